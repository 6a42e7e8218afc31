#include "kvant/tests/conformance/cases.h"

#include <iterator>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace kvant::conformance {
namespace {

using Form = Case::Form;
using Groups = Storage::Groups;

constexpr DataType kStorageTypes[] = {kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kS8,
                                      kU8,  kS4,  kU4,   kS2,     kU2};
constexpr Groups kGroups[] = {Groups::kAlongHead, Groups::kToken, Groups::kChannel, Groups::kHead,
                              Groups::kTensor};

constexpr std::string_view GroupsName(Groups groups) {
  constexpr std::string_view kNames[] = {"slices", "token", "channel", "head", "tensor"};
  return kNames[static_cast<int>(groups)];
}

std::string Name(DataType type) { return std::string(DataTypeName(type)); }

// The i-th element of a list, around and around. Lists have coprime lengths where they
// can, so that pairs of values meet.
template <typename T, size_t n>
T At(const T (&list)[n], int i) {
  return list[static_cast<size_t>(i) % n];
}

// A zero point type that suits the codes.
DataType ZeroPointsFor(DataType code, int i) {
  if (IsFloat(code)) return i % 2 == 0 ? kF32 : kUndef;
  const DataType choices[] = {code, kUndef, kS32, kF32};
  return At(choices, i);
}

// In a graph of queries of another type a floating-point K takes that type.
Storage StorageOf(DataType type, int i) {
  const DataType scales[] = {kF32, kF16, kBF16};
  const int64_t sizes[] = {16, 32, 0, 8};
  return {.type = type,
          .groups = At(kGroups, i),
          .group_size = At(sizes, i / 2),
          .zero_points = ZeroPointsFor(type, i),
          .scales = At(scales, i)};
}

Mask RotatedMask(int i) {
  const Mask::Kind kinds[] = {Mask::Kind::kAdditive, Mask::Kind::kCausal, Mask::Kind::kSelect,
                              Mask::Kind::kBottomRight, Mask::Kind::kSelectInverted};
  const std::string over[] = {"qs", "nhrqs", "s", "ns", "nqs", "hrqs"};
  return {.kind = At(kinds, i),
          .over = At(over, i),
          .fill = i % 3 == 1 ? -3.f : -std::numeric_limits<float>::infinity()};
}

Case Named(Case c, std::string name) {
  c.name = std::move(name);
  return c;
}

// Forms that leave out a batch or a ratio set it to 1.
void SetForm(Case& c, Form form) {
  c.form = form;
  if (form == Form::k3D || form == Form::k2D) c.batch = c.ratio = 1;
  if (form == Form::k2D) c.kv_heads = 1;
  if (form == Form::k4D && c.kv_heads > 1) c.ratio = 1;
}

}  // namespace

Case Rotated(int i) {
  constexpr int64_t kLengths[] = {40, 33, 72, 17, 96, 65, 31};
  constexpr int64_t kQueries[] = {1, 3, 5, 2};
  constexpr int64_t kSizes[] = {16, 32, 24, 40, 20};
  constexpr Form kForms[] = {Form::k5D, Form::k4D, Form::kReshape};
  constexpr Case::KLayout kLayouts[] = {Case::KLayout::kTokenRows, Case::KLayout::kTokenMajor,
                                        Case::KLayout::kTokensLast};
  constexpr Case::Buffers kBuffers[] = {Case::Buffers::kDense, Case::Buffers::kPadded,
                                        Case::Buffers::kInterleaved, Case::Buffers::kDense};
  constexpr DataType kTypes[] = {kF32, kF32, kF16, kBF16, kF32};
  constexpr Case::Scale kScales[] = {Case::Scale::kMultiply, Case::Scale::kDivide,
                                     Case::Scale::kNone};
  Case c;
  c.kv_len = At(kLengths, i);
  c.q_len = At(kQueries, i);
  c.head_size = At(kSizes, i);
  c.v_head_size = i % 3 == 2 ? c.head_size + 8 : 0;
  c.type = At(kTypes, i);
  c.scores = i % 4 == 3 ? c.type : kF32;
  c.k_layout = At(kLayouts, i + i / 3);
  c.buffers = At(kBuffers, i + i / 4);
  c.scale = At(kScales, i);
  c.scalar_of_rank_0 = i % 2 == 0;
  c.cast_probs = i % 5 == 2;
  c.k = StorageOf(At(kStorageTypes, i * 3), i);
  c.v = StorageOf(At(kStorageTypes, i * 7 + 2), i + i / 5 + 2);
  if (i % 3 != 0) c.masks.push_back(RotatedMask(i));
  SetForm(c, At(kForms, i));
  return c;
}

void AddShapeCases(std::vector<Case>& cases) {
  int i = 0;
  for (const int64_t size : {1, 7, 16, 40, 64, 80, 96, 128, 256}) {
    for (int variant = 0; variant < 3; ++variant) {
      Case c = Rotated(i++);
      c.head_size = size;
      c.v_head_size = 0;
      cases.push_back(Named(c, absl::StrCat("HeadSize", size, "_", variant)));
    }
    Case c = Rotated(i++);
    c.head_size = size;
    c.v_head_size = size == 7 ? 19 : size / 2 + 1;
    cases.push_back(Named(c, absl::StrCat("HeadSize", size, "_ValuesOf", c.v_head_size)));
  }
  for (const int64_t ratio : {1, 2, 3, 6, 7, 8, 16}) {
    for (const Form form : {Form::k5D, Form::kReshape, Form::k4D}) {
      Case c = Rotated(i++);
      if (form == Form::k4D) c.kv_heads = 1;  // MQA
      SetForm(c, form);
      c.ratio = ratio;
      constexpr std::string_view kNames[] = {"5D", "4D", "3D", "2D", "Reshape"};
      cases.push_back(
          Named(c, absl::StrCat("Ratio", ratio, "_", std::string(kNames[static_cast<int>(form)]))));
    }
  }
  for (const int64_t kv_len : {1, 2, 31, 33, 64, 65, 257, 1025}) {
    for (const int64_t q_len : {1, 2, 5, 64, 130}) {
      Case c = Rotated(i++);
      c.kv_len = kv_len;
      c.q_len = q_len;
      if (kv_len * q_len > 5000) c.batch = 1;
      if (kv_len * q_len > 20000) c.ratio = 1;
      cases.push_back(Named(c, absl::StrCat("Tokens", kv_len, "_Queries", q_len)));
    }
  }
}

void AddStorageCases(std::vector<Case>& cases) {
  int i = 0;
  for (const DataType k : kStorageTypes) {
    for (const DataType v : kStorageTypes) {
      Case c = Rotated(i);
      c.k = StorageOf(k, i);
      c.v = StorageOf(v, i / 2 + 1);
      // Floating-point K and V have the queries' type.
      if (BitsOf(k) >= 16) c.type = k;
      if (BitsOf(v) >= 16) c.type = v;
      if (c.scores != kF32) c.scores = c.type;
      ++i;
      cases.push_back(Named(c, absl::StrCat("Keys_", Name(k), "_Values_", Name(v))));
    }
  }
  for (const DataType type : {kF8E4M3, kF8E5M2, kS8, kU8, kS4, kU4, kS2, kU2}) {
    for (const Groups groups : kGroups) {
      for (const bool real : {false, true}) {
        Case c = Rotated(i++);
        const DataType zero_points = real ? kF16 : IsFloat(type) ? kUndef : type;
        c.k = {.type = type, .groups = groups, .group_size = 8, .zero_points = zero_points};
        c.v = {.type = type, .groups = groups, .group_size = 4, .zero_points = zero_points};
        c.k.scales = i % 2 == 0 ? kBF16 : kF16;
        c.kv_len = 48;
        cases.push_back(
            Named(c, absl::StrCat("Groups_", Name(type), "_by_", std::string(GroupsName(groups)),
                                  real ? "_real" : "_integer")));
      }
    }
  }
  // Caches as models have them: long heads, groups of 32 and more.
  const Storage caches[] = {
      {.type = kU4, .group_size = 32, .zero_points = kU8, .scales = kF16},
      {.type = kS4, .group_size = 64, .scales = kF16},
      {.type = kU4, .groups = Groups::kToken, .zero_points = kF16, .scales = kF16},
      {.type = kS8, .groups = Groups::kToken, .scales = kF32},
      {.type = kU8, .group_size = 32, .zero_points = kU8, .scales = kBF16},
      {.type = kU2, .group_size = 32, .zero_points = kU8, .scales = kF16},
      {.type = kF8E4M3, .groups = Groups::kToken, .scales = kF16},
  };
  for (const DataType type : {kF16, kBF16, kF32}) {
    for (size_t j = 0; j < std::size(caches); ++j) {
      Case c = Rotated(i++);
      c.form = i % 2 == 0 ? Case::Form::k5D : Case::Form::kFirstClass;
      c.k_layout = Case::KLayout::kTokenRows;
      c.buffers = Case::Buffers::kDense;
      c.batch = 2;
      c.type = type;
      c.scores = kF32;
      c.k = caches[j];
      c.v = caches[(j + i) % std::size(caches)];
      c.head_size = i % 2 == 0 ? 64 : 128;
      c.v_head_size = i % 3 == 0 ? 64 : 128;
      c.kv_len = 150 + 37 * (i % 5);
      c.ratio = 1 + i % 8;
      c.q_len = 1 + i % 3;
      c.real_lengths = i % 3 == 1;
      cases.push_back(Named(c, absl::StrCat("Cache_", Name(type), "_", j)));
    }
  }
  // Groups of tokens that a kernel's tiles cut, whichever way K is walked.
  for (const DataType type : {kU8, kS4, kF8E4M3}) {
    for (const Case::KLayout layout :
         {Case::KLayout::kTokenRows, Case::KLayout::kTokenMajor, Case::KLayout::kTokensLast}) {
      Case c = Rotated(i++);
      c.kv_len = 24 * 23;
      c.k = {.type = type, .groups = Groups::kChannel, .group_size = 24, .zero_points = kF32};
      c.v = {.type = type, .groups = Groups::kChannel, .group_size = 69, .zero_points = kF32};
      c.k_layout = layout;
      cases.push_back(
          Named(c, absl::StrCat("TokenGroups_", Name(type), "_", static_cast<int>(layout))));
    }
  }
  // Odd sizes: rows of codes that start within a byte, groups of one.
  for (const DataType type : {kS4, kU4, kS2, kU2}) {
    Case c;
    c.head_size = 7;
    c.v_head_size = 9;
    c.kv_len = 33;
    c.k = {.type = type, .group_size = 1, .zero_points = type};
    c.v = {.type = type, .groups = Groups::kChannel, .group_size = 11};
    cases.push_back(Named(c, absl::StrCat("OddRows_", Name(type))));
    c.k_layout = Case::KLayout::kTokensLast;
    cases.push_back(Named(c, absl::StrCat("OddRowsTokensLast_", Name(type))));
  }
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  AddShapeCases(cases);
  AddStorageCases(cases);
  AddCodebookCases(cases);
  AddMaskCases(cases);
  AddScalarCases(cases);
  AddFormCases(cases);
  AddMixedTypeCases(cases);
  AddRangeCases(cases);
  AddLoadCases(cases);
  AddHostileCases(cases);
  AddFirstClassCases(cases);
  AddRotationCases(cases);
  return cases;
}

std::ostream& operator<<(std::ostream& out, const Case& c) {
  const auto storage = [](const Storage& s) {
    if (!s.quantized()) return std::string("plain");
    return absl::StrCat(Name(s.type), " by ", std::string(GroupsName(s.groups)), " of ",
                        s.group_size, " scales ", Name(s.scales), " zps ", Name(s.zero_points),
                        s.codebook.empty() ? "" : " with a codebook");
  };
  out << c.name << ": [" << c.batch << ", " << c.kv_heads << " x " << c.ratio << "] " << c.q_len
      << " x " << c.kv_len << ", head " << c.head_size << " -> " << c.value_size() << ", "
      << DataTypeName(c.type) << " scores " << DataTypeName(c.scores) << ", K " << storage(c.k)
      << ", V " << storage(c.v) << ", form " << static_cast<int>(c.form) << ", K layout "
      << static_cast<int>(c.k_layout) << ", buffers " << static_cast<int>(c.buffers) << ", scale "
      << static_cast<int>(c.scale);
  if (c.rotated()) {
    out << ", rotated by " << c.q_hadamard << " " << c.k_hadamard << " " << c.v_hadamard << " "
        << c.output_hadamard;
  }
  if (c.page_size > 0) out << ", pages of " << c.page_size;
  if (c.latent) out << ", V in K";
  if (c.first_tokens) out << ", first tokens";
  if (c.ragged) out << ", ragged queries";
  if (c.real_ranges) out << ", ranges of " << c.plain_head << " + " << c.segments << " segments";
  out << ", masks";
  for (const Mask& mask : c.masks) {
    out << " " << static_cast<int>(mask.kind) << " over " << mask.over << " fill " << mask.fill;
  }
  return out;
}

}  // namespace kvant::conformance
