"""What CI asks of the specialisations: `problems` is empty."""

# Of the committed report, and for the kernel on packed codes of the design's table.
TOLERANCE = 1.15
COUNTED = ("issued_per_element", "alu_per_element", "all_instructions")


def _resources(name, facts):
    spilled = [f"{facts[key]} {what}" for key, what in
               (("spill_store_bytes", "bytes of spill stores"),
                ("spill_load_bytes", "bytes of spill loads"),
                ("stack_bytes", "bytes of stack")) if facts[key]]
    if spilled:
        yield f"{name}: {', '.join(spilled)}"
    if facts["registers"] > facts["register_limit"]:
        yield (f"{name}: {facts['registers']} registers; {facts['blocks_per_multiprocessor']} blocks "
               f"of {facts['threads']} threads leave {facts['register_limit']}")
    if facts["blocks_that_fit"] < facts["blocks_per_multiprocessor"]:
        yield (f"{name}: {facts['blocks_that_fit']} blocks fit a multiprocessor, "
               f"{facts['blocks_per_multiprocessor']} are planned")


def _instructions(name, facts, kept):
    for key in COUNTED:
        if key in facts and key in kept and facts[key] > TOLERANCE * kept[key]:
            yield (f"{name}: {key} is {facts[key]}, {facts[key] / kept[key]:.2f} times the "
                   f"committed {kept[key]}")


def _design(name, kernel, facts):
    if not (getattr(kernel, "design", None) and facts["kernel"].startswith("attention_codes")):
        return
    of_round = kernel.design_of(facts["elements_per_lane"])
    for key, design in zip(("alu_per_element", "issued_per_element"), of_round):
        if facts[key] > TOLERANCE * design:
            yield (f"{name}: {key} is {facts[key]}, {facts[key] / design:.2f} times the "
                   f"design's {design}")


def problems(found, committed):
    """found: of compile_all; committed: report.json, or None where there is nothing to compare."""
    rows = {row["name"]: row["archs"]
            for row in committed["rows"] + committed["stores"]} if committed else {}
    names = [kernel.name for kernel, _ in found]
    if committed and set(rows) != set(names):
        yield f"the report has other rows: {', '.join(sorted(set(rows) ^ set(names)))}"
    for kernel, archs in found:
        if isinstance(archs, str):
            yield f"{kernel.name}: {archs}"
            continue
        for arch, facts in archs.items():
            name = f"{kernel.name}, {arch}"
            yield from _resources(name, facts)
            if kernel.name in rows:
                yield from _instructions(name, facts, rows[kernel.name][arch])
            if arch == "sm_90a" and COUNTED[0] in facts:
                yield from _design(name, kernel, facts)
