"""Makespans and efficiencies as tables (Markdown), data (JSON) and a plot (SVG)."""
import datetime
import json

from cases import BY_TOKENS_WORKERS, DOMAINS, WORKERS
from model import Domains, best_serial, efficiency, makespan

WANTED = 0.9  # of 64 workers
_DOMAIN_WORKERS = (64, 128, 256)


def summary(case, threads, domains):
    """What the tables need of a case."""
    rows = {
        "kernel": case["kernel"],
        "units": len(case["in_order"]),
        "us": {
            "best_serial": best_serial(case),
            "units_in_order": sum(case["in_order"]), "units_apart": sum(case["apart"]), **case["serial"],
        },
        "makespan_us": {w: makespan(case, w, threads["awake"]) for w in WORKERS},
        "efficiency": {
            "runs": {w: efficiency(case, w, threads["awake"]) for w in WORKERS},
            "counter": {w: efficiency(case, w, threads["awake"], "counter") for w in WORKERS},
            "runs, threads asleep": {w: efficiency(case, w, threads["asleep"]) for w in WORKERS},
        },
        "domains": {
            w: {placement: {hand_out: {d: efficiency(case, w, threads["awake"], hand_out, domains(w, d, placement))
                                       for d in DOMAINS} for hand_out in ("runs", "counter")}
                for placement in ("near", "spread", "one")} for w in _DOMAIN_WORKERS},
    }
    return rows


def _cell(value):
    return f"**{value:.2f}**" if value >= WANTED else f"{value:.2f}"


def _efficiencies(cases):
    text = ["| step | units | handed out as | " + " | ".join(map(str, WORKERS)) + " |",
            "|---|--:|---|" + "--:|" * len(WORKERS)]
    for name, case in cases.items():
        for hand_out, of in case["efficiency"].items():
            text.append(f"| {name} | {case['units']} | {hand_out} | "
                        + " | ".join(_cell(of[w]) for w in WORKERS) + " |")
    return text


def _times(cases):
    text = ["| step | best serial | units in order | apart | before | after |"
            + "".join(f" {w} workers |" for w in WORKERS if w >= 16),
            "|---|" + "--:|" * (5 + sum(w >= 16 for w in WORKERS))]
    for name, case in cases.items():
        us = case["us"]
        cells = [f"{us[key]:.0f}" for key in ("best_serial", "units_in_order", "units_apart")]
        cells += [f"{us[key]:.1f}" for key in ("before", "after")]
        cells += [f"{case['makespan_us'][w]:.0f}" for w in WORKERS if w >= 16]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    return text


def _domains(cases):
    text = ["| step | workers | memory | handed out as | " + " | ".join(f"{d} domains" for d in DOMAINS) + " |",
            "|---|--:|---|---|" + "--:|" * len(DOMAINS)]
    for name, case in cases.items():
        for w, placements in case["domains"].items():
            for placement, hand_outs in placements.items():
                for hand_out, of in hand_outs.items():
                    text.append(f"| {name} | {w} | {placement} | {hand_out} | "
                                + " | ".join(_cell(of[d]) for d in DOMAINS) + " |")
    return text


def _by_tokens(by_tokens):
    text = ["| step | " + " | ".join(f"{w} workers" for w in BY_TOKENS_WORKERS) + " |",
            "|---|" + "--:|" * len(BY_TOKENS_WORKERS)]
    for name, of in by_tokens.items():
        text.append(f"| {name} | " + " | ".join(f"{of[w]['us']:.0f}, {of[w]['turns']} turns" for w in BY_TOKENS_WORKERS) + " |")
    return text


def markdown(description, here, cases, by_tokens, remote, domain_gb_per_s):
    per_core = here["read_gb_per_s_of_all"] / here["cores"]
    memory = (f"{domain_gb_per_s:g} GB/s each" if domain_gb_per_s
              else f"{per_core:.1f} GB/s for each of their workers, as the cores here read")
    pools = "; ".join(f"{pool} " + ", ".join(f"{state} {t['wake']:.2g} and {t['join']:.2g}" for state, t in states.items())
                      for pool, states in here["hand_over"].items())
    return "\n".join([
        "# How the CPU's schedules scale: computed, not measured", "",
        f"{datetime.date.today().isoformat()}, {description['cpu']}, {description['cores']} cores "
        f"({description['flags']}), commit {description['commit']}. By `scripts/bench --scaling`: every unit of a "
        "step timed here, on one thread; what so many workers would take is computed from that (docs/benchmarks.md, "
        "\"Many cores\").", "",
        "Efficiency is the time of one worker where no tile is cut, over workers times makespan. What is **bold** is "
        f"{WANTED} or more. Reading: {here['read_gb_per_s_of_one']:.1f} GB/s with one core, "
        f"{here['read_gb_per_s_of_all']:.1f} with {here['cores']}. Waking a thread and joining it, us: {pools}.", "",
        "## Efficiency by workers", "", *_efficiencies(cases), "",
        "![efficiency](scaling.svg)", "",
        "## Times, microseconds", "", *_times(cases), "",
        "Where the heads of a token lie side by side, they take turns, each turn being handed out as one, and how many of "
        "them depends on the number of workers:", "", *_by_tokens(by_tokens), "",
        "## Memory domains", "",
        f"A unit whose memory is another domain's takes {remote:g} times as long; domains deliver {memory}. Memory is near: "
        "with the share of the units that the domain's workers have; spread: over all domains, page by page; one: all in the "
        "first.", "", *_domains(cases), ""])


def _plot(path, cases):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvant"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, case in cases.items():
        of = case["efficiency"]["runs"]
        axes.plot(WORKERS, [of[w] for w in WORKERS], marker=".", label=name,
                  linestyle="-" if name.startswith("int4") else "--")
    axes.axhline(WANTED, color="grey", linewidth=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks([w for w in WORKERS if w & (w - 1) == 0], [str(w) for w in WORKERS if w & (w - 1) == 0])
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("workers")
    axes.set_ylabel("efficiency, computed")
    axes.legend(fontsize=6)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(of) for key, of in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def write(folder, description, here, recorded, by_tokens, threads, remote, domain_gb_per_s):
    folder.mkdir(parents=True, exist_ok=True)
    per_core = here["read_gb_per_s_of_all"] / here["cores"]

    def domains(workers, count, placement):
        gb_per_s = domain_gb_per_s or per_core * workers / count
        return Domains(count, placement, remote, gb_per_s * 1e3)

    cases = {name: summary(case, threads, domains) for name, case in recorded.items()}
    by_tokens = {name: {w: {"turns": len(case["in_order"]), "us": makespan(case, w, threads["awake"])}
                        for w, case in of.items()} for name, of in by_tokens.items()}
    (folder / "scaling.md").write_text(markdown(description, here, cases, by_tokens, remote, domain_gb_per_s))
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(_rounded(case))}" for name, case in cases.items())
    (folder / "scaling.json").write_text(
        f"{{\"machine\": {json.dumps(description)},\n\"measured\": {json.dumps(_rounded(here))},\n"
        f"\"remote\": {remote},\n\"by_tokens\": {json.dumps(_rounded(by_tokens))},\n\"cases\": {{\n{rows}\n}}}}\n")
    _plot(folder / "scaling.svg", cases)
