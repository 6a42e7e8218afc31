"""The machine code of a kernel: blocks, loops, and what one round of its steady loop issues.

The steady loop. Of the loops of the control-flow graph that hold HMMA, the one with most of them is
taken. Where some of these copy ahead (LDGSTS), the others do not count: a kernel in parts has one for
few tokens, which loads them. Then it goes from loop to loop inwards as long as one inner loop holds
at least half of them: so a loop around the whole kernel, or one that repeats it, is passed, and a
short loop of a few HMMA within a round is not mistaken for the round.

The path through a round. At every branch the way is taken that meets the fewest marks of what a
steady round does not do, and of those that meet equally few, the longest. The marks are
  SHFL, CALL, WARPSYNC.COLLECTIVE   rescaling, slow paths of divisions, diverged warps
  4 or more -INF in a block         masks of tiles beyond the last token
  copies that fill with zeros       of such tiles, where others of the round do not fill
Where a branch is on a warp's vote, the shorter of equals is taken: votes ask for what is rare.
A mark that is on every path costs nothing: kernels whose steady round does shuffle are counted with
their shuffles. Loops within the round count as often as the plan says that they are gone through;
in loops that the plan does not know, marks count a hundredfold, and so do copies that fill with
zeros: those loops copy tiles beyond the last token.
"""
import collections
import dataclasses
import re
import subprocess

PIPES = ("ALU", "FMA", "HMMA", "LDSM", "LDS", "LDGSTS", "LDG", "MUFU", "MOVM", "SHFL", "uniform",
         "other")
_PIPE_OF = {
    "HMMA": "HMMA", "IMMA": "HMMA", "QMMA": "HMMA",
    "LDSM": "LDSM", "LDS": "LDS", "STS": "LDS", "LDGSTS": "LDGSTS",
    "LDG": "LDG", "STG": "LDG", "LD": "LDG", "ST": "LDG", "ATOMG": "LDG",
    "MUFU": "MUFU", "I2F": "MUFU", "F2I": "MUFU", "F2F": "MUFU", "I2I": "MUFU", "FRND": "MUFU",
    "MOVM": "MOVM", "SHFL": "SHFL", "R2UR": "uniform", "S2UR": "uniform", "LDCU": "uniform",
}
_PIPE_OF.update(dict.fromkeys(
    "LOP3 LOP SHF SHL SHR PRMT FMNMX FMNMX3 HMNMX2 ISETP FSETP HSETP2 IADD IADD3 SEL FSEL IMNMX "
    "VIADD VIMNMX VIMNMX3 VIADDMNMX LEA PLOP3 BMSK SGXT P2R R2P IABS F2FP I2FP FCHK ISCADD POPC "
    "FLO BREV FSET".split(), "ALU"))
_PIPE_OF.update(dict.fromkeys(
    "FFMA FMUL FADD FFMA2 FMUL2 FADD2 IMAD HMUL2 HADD2 HFMA2 MOV".split(), "FMA"))


@dataclasses.dataclass
class Instruction:
    address: int
    text: str  # with its predicate
    stall: int  # cycles until the warp may issue its next instruction

    @property
    def op(self):
        """LDGSTS.E.BYPASS.LTC128B.128.ZFILL"""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def pipe(self):
        base = self.op.split(".")[0]
        if base in _PIPE_OF:
            return _PIPE_OF[base]
        return "uniform" if base.startswith("U") else "other"

    @property
    def jumps(self):
        """Far jumps are calls without return, to labels of the kernel's own."""
        return self.op.startswith("BRA") or (self.op.startswith("CALL") and "`(.L_" in self.text)

    @property
    def predicated(self):
        return self.text.startswith("@") or bool(re.match(r"BRA\S*\s+!?U?P\d", self.text))


@dataclasses.dataclass
class Block:
    instructions: list
    successors: list = dataclasses.field(default_factory=list)

    @property
    def votes(self):
        """Whether it ends in a branch on a vote."""
        last = self.instructions[-1]
        on = re.match(r"@!?(P\d)|BRA\S*\s+!?(P\d)", last.text)
        if not (on and last.jumps):
            return False
        predicate = on.group(1) or on.group(2)
        return any(i.op.startswith("VOTE") and re.search(rf"\b{predicate}\b", i.text.split(",")[0])
                   for i in self.instructions)

    def marks(self):
        """How much of it is nothing that a steady round does."""
        found = 0
        for i in self.instructions:
            if i.op.startswith(("SHFL", "CALL", "WARPSYNC.COLLECTIVE")) and not i.jumps:
                found += 1
        infinities = sum("-INF" in i.text for i in self.instructions)
        return found + (infinities if infinities >= 4 else 0)

    def zero_fills(self):
        """Copies that fill with zeros what they do not read."""
        return sum(i.op.startswith("LDGSTS") and
                   ("ZFILL" in i.op or bool(re.search(r", !?P\d$", i.text)))
                   for i in self.instructions)


@dataclasses.dataclass
class Loop:
    header: int
    blocks: set
    children: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Round:
    """What a warp issues in one round of the steady loop."""
    pipes: collections.Counter
    stalls: int  # the sum of Instruction.stall: a warp's cycles when nothing else holds it up
    loops: int  # that were found within the round

    @property
    def issued(self):
        return sum(self.pipes.values())


def _target(text):
    match = re.search(r"`\((\S+?)\)", text)
    return match.group(1) if match else None


def parse(listing, entry):
    """Blocks of kernel `entry` in what nvdisasm -c -hex prints; the first is where it begins."""
    items, inside = [], False
    for line in listing.splitlines():
        if match := re.match(r"\.text\.(\S+):", line):
            inside = match.group(1) == entry
        elif not inside:
            continue
        elif match := re.match(r"\s*([.$]\S+):\s*$", line):
            items.append(match.group(1))
        elif match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            items.append(Instruction(int(match.group(1), 16), match.group(2), 0))
        elif match := re.match(r"\s*/\* (0x[0-9a-f]{16}) \*/", line):
            # The upper half of an instruction; bits 105 to 108 of the whole.
            if items and isinstance(items[-1], Instruction):
                items[-1].stall = max(1, int(match.group(1), 16) >> 41 & 15)
    blocks, labels, current = [], {}, []

    def finish():
        nonlocal current
        if current:
            blocks.append(Block(current))
            current = []
    for item in items:
        if isinstance(item, str):
            finish()
            labels[item] = len(blocks)
        else:
            current.append(item)
            if item.jumps or item.op.split(".")[0] in ("EXIT", "RET", "BSYNC", "BRX"):
                finish()
    finish()
    _connect(blocks, labels)
    return blocks


def _connect(blocks, labels):
    """Sets successors. BSYNC goes on where the BSSY of its barrier said, so barriers are followed
    along the graph."""
    seen, todo = set(), [(0, {})]
    while todo:
        n, barriers = todo.pop()
        if n in seen or n >= len(blocks):
            continue
        seen.add(n)
        barriers = dict(barriers)
        for i in blocks[n].instructions:
            if i.op.startswith("BSSY"):
                barriers[re.search(r"\bB\d+", i.text).group(0)] = _target(i.text)
        last = blocks[n].instructions[-1]
        base = last.op.split(".")[0]
        following = [n + 1] if n + 1 < len(blocks) else []
        if last.jumps:
            to = labels.get(_target(last.text))
            taken = [to] if to is not None else []
            both = last.predicated or ".DIV" in last.op
            successors = taken + (following if both else [])
        elif base in ("EXIT", "RET", "BRX"):
            successors = following if last.predicated else []
        elif base == "BSYNC":
            at = barriers.get(re.search(r"\bB\d+", last.text).group(0))
            successors = [labels[at]] if at in labels else following
        else:
            successors = following
        blocks[n].successors = successors
        todo += [(s, barriers) for s in successors]


def _dominators(blocks):
    """block -> the set of those on every path to it; reachable blocks only."""
    order, seen = [], set()
    stack = [(0, iter(blocks[0].successors))]
    seen.add(0)
    while stack:
        n, rest = stack[-1]
        for s in rest:
            if s not in seen:
                seen.add(s)
                stack.append((s, iter(blocks[s].successors)))
                break
        else:
            order.append(n)
            stack.pop()
    order.reverse()
    before = collections.defaultdict(list)
    for n in order:
        for s in blocks[n].successors:
            before[s].append(n)
    found, changed = {0: {0}}, True
    while changed:
        changed = False
        for n in order[1:]:
            new = set.intersection(*(found[p] for p in before[n] if p in found)) | {n}
            if found.get(n) != new:
                found[n], changed = new, True
    return found, before


def find_loops(blocks):
    """The outermost natural loops, each with those within it; by address."""
    dominators, before = _dominators(blocks)
    bodies = {}
    for n in dominators:
        for header in blocks[n].successors:
            if header not in dominators[n]:
                continue
            body, todo = bodies.setdefault(header, {header}), [n]
            while todo:
                m = todo.pop()
                if m not in body:
                    body.add(m)
                    todo += before[m]
    loops = [Loop(h, b) for h, b in sorted(bodies.items(), key=lambda x: (-len(x[1]), x[0]))]
    roots = []
    for i, loop in enumerate(loops):
        around = [o for o in loops[:i] if loop.header in o.blocks]
        (around[-1].children if around else roots).append(loop)
    for loop in loops:
        loop.children.sort(key=lambda c: c.header)
    return roots


def _held(blocks, loop, pipe):
    return sum(i.pipe == pipe for n in loop.blocks for i in blocks[n].instructions)


def steady_loop(blocks):
    """None where no loop holds HMMA."""
    candidates, chosen = find_loops(blocks), None
    copying = [loop for loop in candidates
               if _held(blocks, loop, "LDGSTS") and _held(blocks, loop, "HMMA")]
    candidates = copying or candidates
    while candidates:
        best = max(candidates, key=lambda loop: _held(blocks, loop, "HMMA"))
        held = _held(blocks, best, "HMMA")
        if held == 0 or (chosen and 2 * held < _held(blocks, chosen, "HMMA")):
            break
        chosen, candidates = best, best.children
    return chosen


def _trips(blocks, loop, planned):
    """{header of a loop directly within `loop`: how often it is gone through}; None where their
    number is not what is planned. Machine code need not have a loop that is gone through once, and
    has loops in tails, with marks, that are not in the plan."""
    marked = [any(blocks[n].marks() + blocks[n].zero_fills() for n in child.blocks)
              for child in loop.children]
    unmarked = [child for child, tail in zip(loop.children, marked) if not tail]
    for times in (planned, [n for n in planned if n > 1]):
        for found in (loop.children, unmarked):
            if len(found) == len(times):
                return {child.header: n for child, n in zip(found, times)}
    return None


def count_round(blocks, loop, planned):
    """A Round. planned: how often the loops directly within `loop` are gone through, in the order of
    their addresses. None where there are not as many."""
    trips = _trips(blocks, loop, planned)
    if trips is None:
        return None
    pipes, stalls, _ = _walk(blocks, loop, trips)
    return Round(pipes, stalls, len(loop.children))


# What a mark in a loop that is not in the plan counts for.
_UNPLANNED = 100


def _walk(blocks, loop, trips):
    """(instructions by pipe, stalls, marks) of the steady path from the header back to it."""
    inner = {}  # header -> (what it counts, where it may leave to)
    member = {}
    for child in loop.children:
        times = trips.get(child.header, 1)
        pipes, stalls, marks = _walk(blocks, child, {})
        if child.header not in trips:
            marks += sum(blocks[n].zero_fills() for n in child.blocks)
            marks *= _UNPLANNED
        total = collections.Counter({p: n * times for p, n in pipes.items()})
        leaves = {s for n in child.blocks for s in blocks[n].successors} - child.blocks
        inner[child.header] = ((total, stalls * times, marks * times), leaves & loop.blocks,
                               any(s == loop.header for s in leaves))
        member.update(dict.fromkeys(child.blocks, child.header))

    # Where other copies do not, those that fill with zeros are of tiles beyond the last token.
    copies = sum(i.pipe == "LDGSTS" for n in loop.blocks for i in blocks[n].instructions)
    some_fill = 0 < sum(blocks[n].zero_fills() for n in loop.blocks) < copies

    def own(n):
        if n in inner:
            return inner[n][0]
        block = blocks[n].instructions
        return (collections.Counter(i.pipe for i in block), sum(i.stall for i in block),
                blocks[n].marks() + (blocks[n].zero_fills() if some_fill else 0))

    def successors(n):
        return inner[n][1] if n in inner else [s for s in blocks[n].successors if s in loop.blocks]

    best = {}

    def add(a, b):
        return a[0] + b[0], a[1] + b[1], a[2] + b[2]

    def rank(counts):
        return (-counts[2], sum(counts[0].values()), counts[1])

    def rank_of_vote(counts):
        return (-counts[2], -sum(counts[0].values()), -counts[1])

    # The best way from each block to the header, from the last block back. Iterative: paths are
    # longer than Python's stack.
    order, seen, stack = [], {loop.header}, [(loop.header, iter(successors(loop.header)))]
    while stack:
        n, rest = stack[-1]
        for s in rest:
            if s != loop.header and s not in seen:
                seen.add(s)
                stack.append((s, iter(successors(s))))
                break
        else:
            order.append(n)
            stack.pop()
    for n in order:
        ways = []
        for s in successors(n):
            if s == loop.header:
                ways.append((collections.Counter(), 0, 0))
            elif s in best:
                ways.append(best[s])
        if n in inner and inner[n][2]:
            ways.append((collections.Counter(), 0, 0))
        if ways:
            prefers = rank if n in inner or not blocks[n].votes else rank_of_vote
            best[n] = add(own(n), max(ways, key=prefers))
    return best.get(loop.header, own(loop.header))


def disassemble(nvdisasm, cubin):
    result = subprocess.run([nvdisasm, "-c", "-hex", "-ndf", str(cubin)], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"nvdisasm {cubin}: {result.stderr.strip()}")
    return result.stdout
