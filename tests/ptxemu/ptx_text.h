// Parses the text of PTX into statements. Knows the grammar (PTX ISA, chapters 3 to 5), but not
// what instructions do.
#ifndef KVANT_TESTS_PTXEMU_PTX_TEXT_H_
#define KVANT_TESTS_PTXEMU_PTX_TEXT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kvant::ptxemu {

struct RegisterDecl {
  int bytes = 0;  // of a lane; 4 for predicates, which are held as a mask of the warp
  bool predicate = false;
};

struct OperandText {
  enum Kind { kRegister, kImmediate, kSymbol, kAddress, kVector, kSpecial, kSink, kLabel };
  Kind kind = kSink;
  int reg = -1;                    // kRegister; kAddress: its base, or -1
  int second = -1;                 // kRegister: of "a|b", or -1
  bool negated = false;            // "!%p1"
  uint64_t bits = 0;               // kImmediate
  std::string name;                // kSymbol, kSpecial, kLabel; kAddress: a symbol as base
  int64_t offset = 0;              // kSymbol, kAddress
  std::vector<OperandText> parts;  // kVector
};

struct Statement {
  int line = 0;
  std::string text;
  int guard = -1;
  bool guard_negated = false;
  std::vector<std::string> opcode;  // split at dots
  std::vector<OperandText> operands;
};

struct Variable {
  std::string name, space;  // global, const, shared, local, param
  int64_t align = 1, bytes = 0;
  bool unsized = false;  // "extern .shared .b8 x[]"
  std::vector<uint8_t> init;
};

struct Entry {
  std::string name;
  std::vector<Variable> params;
  std::vector<Variable> variables;  // .local and .shared within
  std::vector<RegisterDecl> registers;
  std::vector<Statement> statements;
  std::map<std::string, int> labels;  // to the index of the next statement
  int max_threads = 0, min_blocks = 0;
};

struct ModuleText {
  std::vector<Variable> variables;
  std::vector<Entry> entries;
};

// Throws std::runtime_error, with the line, where it does not understand the text.
ModuleText ParsePtx(const std::string& text);

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_PTX_TEXT_H_
