"""What is kept of that which was compiled."""

from kvant.kept import Kept


def test_those_that_were_asked_for_last():
    kept, made = Kept(2), []

    def get(key):
        def make():
            made.append(key)
            return [key]

        result = kept.get(key, make)
        assert result == [key]
        return result

    first = get("a")
    get("b")
    assert get("a") is first and made == ["a", "b"]
    get("c")  # in the place of b, which was used before a
    assert get("a") is first and made == ["a", "b", "c"]
    get("b")
    assert get("a") is first and made == ["a", "b", "c", "b"]
