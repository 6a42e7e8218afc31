// From statements to instructions. An instruction that is not known is an error when its kernel is
// loaded, so that nothing is passed over in silence.
//
// Most opcodes are rows of a table (operations.h). Those whose operands take a form of their own
// have a function here that decodes them; it stands beside their handlers.
#ifndef KVANT_TESTS_PTXEMU_DECODER_H_
#define KVANT_TESTS_PTXEMU_DECODER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvant/tests/ptxemu/kernel.h"
#include "kvant/tests/ptxemu/operations.h"

namespace kvant::ptxemu {

// Bytes of a value of a type, which may be less than those of its register.
int TypeBytes(const std::string& type);

class Decoder {
 public:
  Decoder(const Entry& entry, const ModuleText& module,
          const std::map<std::string, uint64_t>& globals);
  std::unique_ptr<Kernel> Decode();

  // ---- The statement that is being decoded, and the instruction that it becomes.
  const std::vector<std::string>& opcode() const { return statement_->opcode; }
  const std::string& type() const { return statement_->opcode.back(); }
  bool Has(const char* part) const;  // of the opcode
  size_t operands() const { return statement_->operands.size(); }
  const OperandText& operand(size_t n) const;
  Space space() const;
  Instruction& now() { return *now_; }
  int label(const OperandText& o) const;  // the index of its instruction
  uint64_t symbol(const std::string& name) const;
  [[noreturn]] void Unknown(const std::string& what) const;

  // ---- Add an operand. bytes: what the instruction takes; 0 takes any register.
  void AddResult(const OperandText& o, int bytes);
  // The second result of "a|b", a predicate, where there is one.
  void AddSecondResult(const OperandText& o);
  void AddSource(const OperandText& o, int bytes);
  void AddPredicate(const OperandText& o);
  void AddConstant(uint64_t bits, int bytes);
  // What is stored, which is in a register of at least `bytes`.
  void AddStored(const OperandText& o, int bytes);
  // Each of a vector, or the one that there is.
  void AddResults(const OperandText& o, int bytes);
  void AddSources(const OperandText& o, int bytes);
  // An address is a register, which becomes a source, or else a symbol, which goes into the offset.
  // Whether there is a register.
  bool AddAddress(const OperandText& o, int64_t* offset);
  // The lanes of a membermask must come.
  void AddMembers(const OperandText& o);
  void Use(const Operation& operation);

 private:
  void PlaceSymbols(const ModuleText& module);
  void PlaceRegisters();
  void DecodeStatement(const Statement& s);
  void DecodeOperation();
  int OpcodeNumber(const Statement& s);
  Slot RegisterSlot(int reg) const;
  Slot Constant(uint64_t bits, int bytes);
  Slot Source(const OperandText& o, int bytes);
  void PushResult(const Slot& s);
  void PushSource(const Slot& s);

  std::unique_ptr<Kernel> kernel_;
  std::unordered_map<std::string, int> opcode_numbers_;
  const Statement* statement_ = nullptr;
  Instruction* now_ = nullptr;
};

// moves.cc
void DecodeMove(Decoder& d);
void DecodeCvta(Decoder& d);
// predicates.cc
void DecodeSetp(Decoder& d);
void DecodeSelp(Decoder& d);
void DecodePredicateLogic(Decoder& d);
// loads_and_stores.cc
void DecodeLoad(Decoder& d);
void DecodeStore(Decoder& d);
void DecodeAtomic(Decoder& d);
// copies.cc
void DecodeCopy(Decoder& d);
// control.cc
void DecodeBranch(Decoder& d);
void DecodeExit(Decoder& d);
void DecodeBarrier(Decoder& d);
void DecodeFence(Decoder& d);
void DecodeShuffle(Decoder& d);
void DecodeVote(Decoder& d);
void DecodeActiveMask(Decoder& d);
// matrix.cc
void DecodeMma(Decoder& d);
void DecodeLoadMatrix(Decoder& d);
void DecodeMoveMatrix(Decoder& d);

// contract.cc: as ptxas may do with what has no rounding mode, makes fma of mul and add.
void Contract(Kernel& kernel);

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_DECODER_H_
