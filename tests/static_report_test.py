"""bench/static finds the steady loop of a listing and the steady path through it, and its gate
reports what is planted. Usage: static_report_test.py SOURCE_DIR [BUILD_DIR]"""
import copy
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "bench/static"))

import gate  # noqa: E402
import kernels  # noqa: E402
import report  # noqa: E402
import sass  # noqa: E402
import stores  # noqa: E402

# A loop around all (.L_x_0), the steady loop (.L_x_1) with a short loop (.L_x_3) and a cold branch
# in it, and a tail (.L_x_5) with fewer HMMA.
LISTING = """
.text.other:
        /*0000*/                   HMMA.16816.F32 R0, R4, R8, R0 ;
.text.kernel:
.L_x_0:
        /*0000*/                   MOV R1, 0x1 ;
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   BSSY B0, `(.L_x_2) ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
        /*0040*/                   SHFL.BFLY PT, R0, R1, 0x1, 0x1f ;
        /*0050*/                   FMUL R0, R0, R1 ;
        /*0060*/                   FMUL R0, R0, R1 ;
        /*0070*/                   BSYNC B0 ;
.L_x_2:
        /*0080*/                   HMMA.16816.F32 R0, R4, R8, R0 ;
        /*0090*/                   HMMA.16816.F32 R0, R4, R8, R0 ;
        /*00a0*/                   HMMA.16816.F32 R0, R4, R8, R0 ;
.L_x_3:
        /*00b0*/                   LOP3.LUT R1, R1, 0xf, RZ, 0xc0, !PT ;
        /*00c0*/                   HMMA.16816.F32 R0, R4, R8, R0 ;
        /*00d0*/               @P1 CALL.REL.NOINC `(.L_x_4) ;
        /*00e0*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*00f0*/              @!P2 BRA `(.L_x_1) ;
.L_x_5:
        /*0100*/                   HMMA.16816.F32 R0, R4, R8, R0 ;
        /*0110*/              @!P3 BRA `(.L_x_5) ;
        /*0120*/              @!P4 BRA `(.L_x_0) ;
        /*0130*/                   EXIT ;
"""


class SassTest(unittest.TestCase):
    def setUp(self):
        self.blocks = sass.parse(LISTING, "kernel")
        self.loop = sass.steady_loop(self.blocks)

    def test_steady_loop_is_inside_what_repeats_it(self):
        self.assertEqual(self.blocks[self.loop.header].instructions[0].address, 0x10)
        self.assertEqual(len(self.loop.children), 1)

    def test_of_two_loops_the_one_that_copies_ahead_is_taken(self):
        few = """        /*0000*/                   HMMA.16816.F32 R0, R4, R8, R0 ;
        /*0010*/                   LDGSTS.E.64 [R1], [R2.64] ;
        /*0020*/              @!P2 BRA `(.L_x_0) ;
"""
        many = "".join(f"        /*00{n}0*/                   HMMA.16816.F32 R0, R4, R8, R0 ;\n" for n in (3, 4, 5))
        end = """        /*0060*/              @!P2 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""
        listing = f".text.kernel:\n.L_x_0:\n{few}.L_x_1:\n{many}{end}"
        for text, address in ((listing, 0x00), (listing.replace("LDGSTS", "LDG"), 0x30)):
            blocks = sass.parse(text, "kernel")
            self.assertEqual(blocks[sass.steady_loop(blocks).header].instructions[0].address, address)

    def test_cold_branch_is_left_out_and_inner_loop_counts_as_often_as_planned(self):
        self.assertIsNone(sass.count_round(self.blocks, self.loop, [5, 6]))
        counted = sass.count_round(self.blocks, self.loop, [5])
        self.assertEqual(counted.loops, 1)
        self.assertEqual(counted.pipes["SHFL"], 0)
        self.assertEqual(counted.pipes["FMA"], 0)
        self.assertEqual(counted.pipes["LDSM"], 1)
        self.assertEqual(counted.pipes["HMMA"], 3 + 5)
        self.assertEqual(counted.pipes["ALU"], 5)

    def test_mark_on_every_path_is_counted(self):
        blocks = sass.parse(LISTING.replace("LDSM.16.M88.4 R4, [R2]", "SHFL.IDX PT, R0, R1"), "kernel")
        counted = sass.count_round(blocks, sass.steady_loop(blocks), [1])
        self.assertEqual(counted.pipes["SHFL"], 1)

    def test_copies_that_fill_are_tails_where_others_do_not(self):
        copies = """        /*0040*/                   LDGSTS.E.64.ZFILL [R1], [R2.64], P1 ;
        /*0050*/                   FMUL R0, R0, R1 ;
        /*0060*/                   BRA `(.L_x_2) ;
.L_x_6:
        /*0070*/                   LDGSTS.E.64 [R1], [R2.64] ;
"""
        first, last = LISTING.index("        /*0040*/ "), LISTING.index(".L_x_2:")
        before = LISTING[:first].replace("!P0 BRA `(.L_x_2)", "!P0 BRA `(.L_x_6)")
        some = before + copies + LISTING[last:]
        every = some.replace("64 [R1], [R2.64] ;", "64.ZFILL [R1], [R2.64], P1 ;")
        for text, multiplied in ((some, 0), (every, 1)):
            blocks = sass.parse(text, "kernel")
            counted = sass.count_round(blocks, sass.steady_loop(blocks), [5])
            self.assertEqual(counted.pipes["FMA"], multiplied)
            self.assertEqual(counted.pipes["LDGSTS"], 1)

    def test_stall_counts(self):
        line = "        /*0000*/                   MOV R1, 0x1 ;        /* 0x0000000100017802 */\n"
        hexed = f".text.kernel:\n{line}        /* 0x000fca0000000f00 */\n"
        self.assertEqual(sass.parse(hexed, "kernel")[0].instructions[0].stall, 5)


FACTS = {"kernel": "attention_codes_d128", "threads": 128, "registers": 128, "register_limit": 128,
         "shared_bytes": 1024, "blocks_per_multiprocessor": 4, "blocks_that_fit": 4,
         "spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0, "nvrtc": "13.0",
         "elements_per_lane": 256.0, "instructions": {}, "issued": 320, "stall_cycles": 900,
         "issued_per_element": 1.25, "alu_per_element": 0.8}


class GateTest(unittest.TestCase):
    kernel = kernels.Kernel("decode u4", ("--dtype", "f16", "--head-size", "128", "--kv-len", "64",
                                          "--k", "u4:token", "--v", "u4:token"),
                            "decode", {256: (0.75, 1.21), 512: (0.72, 1.12)})

    def problems(self, **planted):
        committed = report.to_json([(self.kernel, {"sm_90a": FACTS})])
        facts = copy.deepcopy(FACTS)
        facts.update(planted)
        return list(gate.problems([(self.kernel, {"sm_90a": facts})], committed))

    def test_clean(self):
        self.assertEqual(self.problems(), [])
        self.assertEqual(self.problems(issued_per_element=1.39), [])

    def test_reports_what_is_planted(self):
        for planted, text in (({"spill_load_bytes": 4}, "4 bytes of spill loads"),
                              ({"stack_bytes": 8}, "8 bytes of stack"),
                              ({"registers": 129}, "129 registers"),
                              ({"blocks_that_fit": 3}, "3 blocks fit"),
                              ({"issued_per_element": 1.5}, "times the design's 1.21"),
                              ({"alu_per_element": 0.95}, "times the committed 0.8")):
            self.assertIn(text, " ".join(self.problems(**planted)), planted)

    def test_stores_are_counted_whole(self):
        store = stores.STORES[0]
        facts = {**FACTS, "all_instructions": 100}
        committed = report.to_json([(store, {"sm_90a": facts})])
        for count, problems in ((114, 0), (116, 1)):
            found = [(store, {"sm_90a": {**facts, "all_instructions": count}})]
            self.assertEqual(len(list(gate.problems(found, committed))), problems)
        self.assertIn("spill", " ".join(
            gate.problems([(store, {"sm_90a": {**facts, "spill_load_bytes": 4}})], committed)))

    def test_rows_are_those_of_the_report(self):
        committed = {"rows": [{"name": "x", "archs": 0}], "stores": []}
        self.assertIn("other rows", " ".join(gate.problems([], committed)))

    def test_budget(self):
        # 132 x 4 x 32 x 1.98 GHz over 3.0 TB/s / (136 / 256) bytes.
        self.assertAlmostEqual(report.budget(report.GPUS[0], 1.98e9, 136 / 256), 5.92, places=2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
