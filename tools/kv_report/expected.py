"""What right implementations show on this model and text, to compare a run with."""

import numpy as np

# Lower KL on every window, from left to right.
ORDERINGS = (
    ("q8_0", "fp8_th", "int4_g32", "q4_0"),
    ("kivi4", "k4ch32_v4g32", "rotKV4_g32", "int4_g32"),
    ("kivi2", "int2_g32_R128", "int2_g32"),
    ("rotKV4_g64_R128_s4", "int4_g64_R128_s4", "int4_g64"),
)

# Over windows 0 to 7, by an independent implementation (torch, f32):
# mean KL, its 99th percentile, agreement of the likeliest token.
INDEPENDENT_WINDOWS = tuple(range(8))
INDEPENDENT = {
    "f16": (1e-6, 0, .9996),
    "int8_th": (.00113, .010, .985),
    "fp8_th": (.0087, .075, .953),
    "int4_g32": (.104, .78, .843),
    "kivi2": (.250, 1.82, .772),
}
# Quantized runs are chaotic: rounding elsewhere flips codes. Two right runs differ by this.
KLD_TOLERANCE = .08  # relative, over eight windows
TOP1_TOLERANCE = .008


def orderings(klds):
    """[(better, worse, on how many windows, of how many)] from {scheme: KL per window}."""
    found = []
    for ordering in ORDERINGS:
        have = [scheme for scheme in ordering if scheme in klds]
        for better, worse in zip(have, have[1:]):
            holds = np.less(klds[better], klds[worse])
            found.append((better, worse, int(holds.sum()), len(holds)))
    return found


def deviations(rows):
    """[(scheme, KL, expected, whether within tolerance)] of summaries over all eight windows."""
    found = []
    for scheme, (kld, _, top1) in INDEPENDENT.items():
        if scheme in rows:
            got = rows[scheme]
            # The KL of f16 is itself of the size of f32's rounding.
            near = abs(got["kld_mean"] - kld) <= max(KLD_TOLERANCE * kld, 1e-6)
            found.append((scheme, got["kld_mean"], kld,
                          near and abs(got["top1"] - top1) <= TOP1_TOLERANCE))
    return found
