"""Numbers on the command line that are at least 1."""


def count(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def counts(text):
    return [count(n) for n in text.split(",")]


counts.__name__ = "count"  # in argparse's messages
