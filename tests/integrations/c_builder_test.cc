// Graphs built by calls of the C ABI: what a wrong call does to its builder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "kvant/tests/integrations/c_abi.h"
#include "kvant_test_config.h"

namespace kvant::c_abi {
namespace {

using testing::HasSubstr;

// Each wrong call on a builder of its own, on which nothing goes after it.
TEST(CBuilderTest, WrongCallsAreRefusedAtOnceAndKept) {
  const int64_t dims[] = {4};
  kvant_tensor x = {};
  x.size = sizeof x;
  x.name = "x";
  x.type = KVANT_F32;
  x.rank = 1;
  x.dims = dims;
  kvant_attr axles = {}, nameless = {}, axes[2] = {};
  [[maybe_unused]] kvant_attr huge = {};
  axles.name = "axles";
  axes[0].name = axes[1].name = "axis";
  const float scale = 1;
  huge.name = "scales";
  huge.type = KVANT_ATTR_F32S;
  huge.value.f32s = &scale;
  huge.count = size_t{1} << 60;
  const kvant_value foreign[] = {17};
  using Wrong = std::function<kvant_status(kvant_builder*, const kvant_value*)>;
  const auto op = [&](const char* kind, const kvant_value* inputs, const kvant_attr* attr,
                      size_t attrs = 1) {
    return [=](kvant_builder* to, const kvant_value* values) {
      kvant_value result = 0;
      kvant_tensor type = {};
      type.size = sizeof type;
      return kvant_builder_op(to, kind, nullptr, inputs == nullptr ? values : inputs, 1, attr,
                              attr == nullptr ? 0 : attrs, &type, 1, &result);
    };
  };
  const auto constant = [](kvant_type type) {
    return [type](kvant_builder* to, const kvant_value*) {
      kvant_value value = 0;
      return kvant_builder_constant(to, type, 1e6, &value);
    };
  };
  const std::pair<Wrong, const char*> cases[] = {
      {op("Attend", nullptr, nullptr), "there is no op 'Attend'"},
      {op("Tanh", foreign, nullptr), "17 is no value of this builder"},
      {op("ReLU", nullptr, &axles), "ReLU has no attribute 'axles'; it has none"},
      {op("SoftMax", nullptr, &axles), "SoftMax has no attribute 'axles'; it has axis, mode"},
      {op("SoftMax", nullptr, axes, 2), "SoftMax: attribute 'axis' is given twice"},
      {op("ReLU", nullptr, &nameless), "the name of an attribute is null"},
#ifndef KVANT_SANITIZED  // whose operator new ends the process
      {op("Quantize", nullptr, &huge), "there is not enough memory"},
#endif
      {constant(KVANT_F16), "1e+06 is no f16"},
      {constant(static_cast<kvant_type>(99)), "99"},
      {[&x](kvant_builder* to, const kvant_value*) {
         kvant_tensor unknown = x;
         unknown.type = static_cast<kvant_type>(99);
         kvant_value value = 0;
         return kvant_builder_input(to, &unknown, &value);
       },
       "99"},
      {[](kvant_builder* to, const kvant_value*) {
         return kvant_builder_output(to, "y", 17, nullptr);
       },
       "17 is no value of this builder"},
  };
  for (const auto& [wrong, why] : cases) {
    kvant_builder* made = nullptr;
    ASSERT_OK(kvant_builder_create(nullptr, &made));
    const Builder builder(made);
    kvant_value values[2] = {};
    ASSERT_OK(kvant_builder_input(made, &x, values));
    const kvant_status status = wrong(made, values);
    EXPECT_NE(status, KVANT_OK);
    const std::string error = kvant_error();
    EXPECT_THAT(error, HasSubstr(why));
    EXPECT_EQ(op("ReLU", nullptr, nullptr)(made, values), status) << error;
    EXPECT_EQ(kvant_error(), "the builder refused an earlier call: " + error);
    kvant_graph* graph = nullptr;
    EXPECT_EQ(kvant_builder_build(made, &graph), status) << error;
    EXPECT_EQ(kvant_error(), error) << "the first error was forgotten";
    kvant_tensor known = {};
    known.size = sizeof known;
    EXPECT_OK(kvant_builder_describe(made, values[0], &known));
    EXPECT_EQ(kvant_builder_describe(made, 1, &known), status);
    EXPECT_EQ(kvant_error(), error) << "of a value that a failed call did not make";
  }
}

TEST(CBuilderTest, BuildersBuildOnce) {
  kvant_builder* made = nullptr;
  ASSERT_OK(kvant_builder_create(nullptr, &made));
  const Builder builder(made);
  const int64_t dims[] = {4};
  kvant_tensor x = {}, result = {};
  x.size = result.size = sizeof x;
  x.name = "x";
  x.type = KVANT_F32;
  x.rank = 1;
  x.dims = dims;
  kvant_value values[2] = {};
  ASSERT_OK(kvant_builder_input(made, &x, values));
  ASSERT_OK(kvant_builder_op(made, "ReLU", nullptr, values, 1, nullptr, 0, &result, 1, values + 1));
  kvant_graph* graph = nullptr;
  ASSERT_OK(kvant_builder_build(made, &graph));
  const Graph owned(graph);
  EXPECT_EQ(kvant_builder_op(made, "ReLU", nullptr, values, 1, nullptr, 0, &result, 1, values + 1),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "a builder builds one graph, and this one has");
}

}  // namespace
}  // namespace kvant::c_abi
