"""What bench/scaling computes from recorded times: makespans worked out by hand, and its tables. Usage:
bench_scaling_test.py SOURCE_DIR BUILD_DIR
"""
import json
import pathlib
import subprocess
import sys

SOURCE, BUILD = (pathlib.Path(p).resolve() for p in sys.argv[1:3])
sys.path.insert(0, str(SOURCE / "bench/scaling"))

import cases  # noqa: E402
import model  # noqa: E402
import tables  # noqa: E402

FREE = model.Threads(wake=0, join=0)


def same(got, expected):
    assert abs(got - expected) < 1e-9, (got, expected)


def case_of(units, apart, least=None, before=0, after=0, n_bytes=0):
    return {"kernel": "a kernel", "bytes": n_bytes, "serial": {"before": before, "after": after},
            "in_order": units, "apart": apart, "least": least or [sum(units)]}


def check_loops():
    same(model.loop([1, 2, 3], [9, 9, 9], 1, FREE), 6)
    # Two runs of two units, of which the first is apart from what its worker did before.
    same(model.loop([1] * 4, [2] * 4, 2, FREE), 3)
    # Of one counter every unit is.
    same(model.loop([1] * 4, [2] * 4, 2, FREE, "counter"), 4)
    # Three units each; worker 1, ready at 3, takes unit 2, the back half of what is left to worker 0.
    same(model.loop([10, 10, 10, 1, 1, 1], [10, 10, 10, 1, 1, 1], 2, FREE), 20)
    # The caller begins at once, the thread it wakes a wake-up later, the next two after another.
    assert [model.start(w, 1) for w in (0, 1, 2, 3, 4, 7, 8)] == [0, 1, 2, 2, 3, 3, 4]
    same(model.loop([5] * 4, [5] * 4, 4, model.Threads(wake=1, join=0.5)), 2 + 5 + 0.5)
    # More workers than units.
    same(model.loop([5, 5], [5, 5], 8, FREE), 5)


def check_domains():
    near = model.Domains(2, "near", remote=3)
    same(model.loop([1] * 4, [1] * 4, 2, FREE, domains=near), 2)
    # The counter hands units 0 and 2 to worker 0, 1 and 3 to worker 1: one of each is remote.
    same(model.loop([1] * 4, [1] * 4, 2, FREE, "counter", near), 4)
    same(model.loop([1] * 4, [1] * 4, 2, FREE, domains=model.Domains(2, "spread", remote=3)), 4)
    # All in the first: worker 1 takes 3 for unit 2, worker 0 takes unit 3 at 2 and is at home.
    same(model.loop([1] * 4, [1] * 4, 2, FREE, domains=model.Domains(2, "one", remote=3)), 3)
    # 80 bytes at 10 a microsecond, from two domains and from one of them.
    for placement, us in (("near", 4), ("one", 8)):
        domains = model.Domains(2, placement, remote=1, bytes_per_us=10)
        same(model.loop([1] * 4, [1] * 4, 2, FREE, domains=domains, n_bytes=80), us)


def check_makespans():
    case = case_of([2] * 4, [3] * 4, least=[3, 3], before=1, after=0.25)
    same(model.best_serial(case), 7.25)
    same(model.makespan(case, 1, FREE), 1 + 8 + 0.25)
    same(model.makespan(case, 2, FREE), 1 + 5 + 0.25)
    same(model.makespan(case, 4, model.Threads(wake=1, join=0.5)), 1 + (2 + 3) + 0.5 + 0.25)
    same(model.efficiency(case, 2, FREE), 7.25 / (2 * 6.25))
    # Splitting is not free: one worker has its units' sum to show for it.
    assert model.efficiency(case, 1, FREE) < 1


def check_tables():
    here = {"cores": 2, "read_gb_per_s_of_one": 20.0, "read_gb_per_s_of_all": 30.0,
            "hand_over": {"oneTBB": {"awake": {"wake": 0.5, "join": 0.1}, "asleep": {"wake": 50.0, "join": 1.0}}}}
    threads = {state: model.Threads(**t) for state, t in here["hand_over"]["oneTBB"].items()}
    machine = {"cpu": "a CPU", "cores": 2, "flags": "", "commit": ""}
    case = case_of([1000.0] * 256, [1000.0] * 256)
    summaries = {"a step": tables.summary(case, threads, lambda workers, count, placement: model.Domains(count, placement))}
    by_tokens = {"by tokens": {w: {"us": 1000.0 / w, "turns": 3 * w} for w in cases.BY_TOKENS_WORKERS}}
    text = tables.markdown(machine, here, summaries, by_tokens, 1.5, None)
    assert "| by tokens | 125, 24 turns | 62, 48 turns |" in text, text
    assert "| a step | 256 | runs | **1.00** |" in text, text
    assert "15.0 GB/s for each" in text, text


def check_recording():
    """The program that records, on a small step of each kind."""
    program = BUILD / "kvant_unit_times"
    if not program.exists():
        print("kvant_unit_times is not built: recording is not tested")
        return
    for lengths in ([600], [600, 100, 1]):
        request = {**cases.CASES["int4, 32k tokens, 8 KV heads"], "kv_heads": 2, "lengths": lengths, "rounds": 3}
        run = subprocess.run([program], input=json.dumps(request), capture_output=True, text=True, check=True)
        got = json.loads(run.stdout)
        assert len(got["in_order"]) == len(got["apart"]) > len(got["least"]) == 2 * len(lengths), got
        assert 0 < model.efficiency(got, 4, FREE), got
    # Heads of a token side by side take turns: as few as there are chunks, or with many workers one each.
    for workers, turns in ((4, 8), (256, 64)):
        request = {**cases.BY_TOKENS["int8, 32k tokens, 8 KV heads, [N, S, H, D]"], "lengths": [4096], "workers": workers,
                   "rounds": 1}
        run = subprocess.run([program], input=json.dumps(request), capture_output=True, text=True, check=True)
        assert len(json.loads(run.stdout)["in_order"]) == turns, (workers, turns)
    run = subprocess.run([program], input="no", capture_output=True, text=True)
    assert run.returncode == 2 and "no JSON" in run.stderr, run


if __name__ == "__main__":
    check_loops()
    check_domains()
    check_makespans()
    check_tables()
    check_recording()
