#include "kvant/tests/ptxemu/decoder.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

// By the first part of an opcode.
const std::unordered_map<std::string, void (*)(Decoder&)>& Irregular() {
  static const auto* const table =
      new std::unordered_map<std::string, void (*)(Decoder&)>{{"mov", DecodeMove},
                                                              {"cvta", DecodeCvta},
                                                              {"setp", DecodeSetp},
                                                              {"selp", DecodeSelp},
                                                              {"ld", DecodeLoad},
                                                              {"ldu", DecodeLoad},
                                                              {"st", DecodeStore},
                                                              {"atom", DecodeAtomic},
                                                              {"red", DecodeAtomic},
                                                              {"cp", DecodeCopy},
                                                              {"bra", DecodeBranch},
                                                              {"ret", DecodeExit},
                                                              {"exit", DecodeExit},
                                                              {"bar", DecodeBarrier},
                                                              {"barrier", DecodeBarrier},
                                                              {"membar", DecodeFence},
                                                              {"fence", DecodeFence},
                                                              {"shfl", DecodeShuffle},
                                                              {"vote", DecodeVote},
                                                              {"activemask", DecodeActiveMask},
                                                              {"mma", DecodeMma},
                                                              {"ldmatrix", DecodeLoadMatrix},
                                                              {"movmatrix", DecodeMoveMatrix}};
  return *table;
}

const Operations& Regular() {
  static const auto* const table = [] {
    auto* made = new Operations;
    AddIntegers(*made);
    AddFloats(*made);
    AddHalves(*made);
    AddConversions(*made);
    return made;
  }();
  return *table;
}

size_t AlignUp(size_t value, size_t align) { return (value + align - 1) / align * align; }

std::string Joined(const std::vector<std::string>& opcode) {
  std::string name = opcode[0];
  for (size_t n = 1; n < opcode.size(); ++n) name.append(".").append(opcode[n]);
  return name;
}

// Who runs off the end leaves.
const Statement& End() {
  static const auto* const end = [] {
    auto* made = new Statement;
    made->text = "(end)";
    made->opcode = {"(end)"};
    return made;
  }();
  return *end;
}

}  // namespace

int TypeBytes(const std::string& type) {
  static const auto* const others = new std::unordered_map<std::string, int>{
      {"f16x2", 4}, {"bf16x2", 4}, {"tf32", 4}, {"pred", 4}, {"bf16", 2}};
  const auto found = others->find(type);
  if (found != others->end()) return found->second;
  const size_t digits = type.find_first_of("0123456789");
  return digits == std::string::npos ? 0 : std::atoi(type.c_str() + digits) / 8;
}

std::unique_ptr<Kernel> Decode(const Entry& entry, const ModuleText& module,
                               const std::map<std::string, uint64_t>& globals,
                               const Options& options) {
  auto kernel = Decoder(entry, module, globals).Decode();
  if (options.contract) Contract(*kernel);
  return kernel;
}

Decoder::Decoder(const Entry& entry, const ModuleText& module,
                 const std::map<std::string, uint64_t>& globals)
    : kernel_(std::make_unique<Kernel>()) {
  kernel_->name = entry.name;
  kernel_->entry = &entry;
  kernel_->symbols = globals;
  PlaceSymbols(module);
  PlaceRegisters();
}

// Dynamic shared memory follows the static.
void Decoder::PlaceSymbols(const ModuleText& module) {
  Kernel& k = *kernel_;
  const auto place = [&](const Variable& v, size_t base, size_t* size) {
    *size = AlignUp(*size, static_cast<size_t>(v.align));
    k.symbols[v.name] = base + *size;
    *size += static_cast<size_t>(v.bytes);
  };
  for (const Variable& p : k.entry->params) place(p, 0, &k.param_bytes);
  std::vector<const Variable*> dynamic;
  size_t dynamic_align = 1;
  for (const auto* variables : {&module.variables, &k.entry->variables}) {
    for (const Variable& v : *variables) {
      if (v.space == "local") place(v, 0, &k.local_bytes);
      if (v.space != "shared") continue;
      if (v.unsized) {
        dynamic.push_back(&v);
        dynamic_align = std::max(dynamic_align, static_cast<size_t>(v.align));
      } else {
        place(v, kSharedBase, &k.static_shared);
      }
    }
  }
  k.static_shared = AlignUp(k.static_shared, dynamic_align);
  for (const Variable* v : dynamic) k.symbols[v->name] = kSharedBase + k.static_shared;
}

void Decoder::PlaceRegisters() {
  for (const RegisterDecl& r : kernel_->entry->registers) {
    kernel_->register_offsets.push_back(static_cast<uint32_t>(kernel_->file_bytes));
    kernel_->file_bytes += r.predicate ? 8 : static_cast<size_t>(r.bytes) * kLanes;
    kernel_->file_bytes = AlignUp(kernel_->file_bytes, 64);
  }
}

std::unique_ptr<Kernel> Decoder::Decode() {
  std::vector<Instruction>& program = kernel_->program;
  program.reserve(kernel_->entry->statements.size() + 1);
  for (const Statement& s : kernel_->entry->statements) {
    now_ = &program.emplace_back();
    DecodeStatement(s);
  }
  now_ = &program.emplace_back();
  now_->flow = Flow::kExit;
  now_->text = &End();
  now_->opcode = OpcodeNumber(End());
  return std::move(kernel_);
}

void Decoder::DecodeStatement(const Statement& s) {
  statement_ = &s;
  now_->text = &s;
  now_->guard = s.guard;
  now_->guard_negated = s.guard_negated;
  now_->opcode = OpcodeNumber(s);
  const auto irregular = Irregular().find(s.opcode[0]);
  if (irregular != Irregular().end()) {
    irregular->second(*this);
  } else if (type() == "pred") {
    DecodePredicateLogic(*this);
  } else {
    DecodeOperation();
  }
  if (now_->flow == Flow::kNext && now_->run == nullptr) Unknown("instruction");
}

void Decoder::DecodeOperation() {
  std::string name = Joined(opcode());
  const Operation* found = nullptr;
  if (opcode()[0] == "cvt") {
    const auto width = [&](size_t n) {
      const OperandText& o = operand(n);
      if (o.kind != OperandText::kRegister) return 0;
      return kernel_->entry->registers[static_cast<size_t>(o.reg)].bytes;
    };
    const std::string& to = opcode()[opcode().size() - 2];
    const bool exact = width(0) == TypeBytes(to) && width(1) == TypeBytes(type());
    if (exact) found = Regular().Find(name + kExactWidths);
  } else if (const size_t rn = name.find(".rn."); rn != std::string::npos) {
    name.erase(rn, 3);
  }
  if (found == nullptr) found = Regular().Find(name);
  if (found == nullptr) Unknown("instruction");
  Use(*found);
}

int Decoder::OpcodeNumber(const Statement& s) {
  std::string name = Joined(s.opcode);
  // The widths of copies are operands.
  if (name.rfind("cp.async.c", 0) == 0 && s.operands.size() > 2) {
    name += StrCat(" ", s.operands[2].bits, s.operands.size() > 3 ? " zfill" : "");
  }
  const auto [found, is_new] =
      opcode_numbers_.emplace(name, static_cast<int>(kernel_->opcodes.size()));
  if (is_new) kernel_->opcodes.push_back(name);
  return found->second;
}

// ---- What families ask

void Decoder::Unknown(const std::string& what) const {
  throw std::runtime_error(
      StrCat("PTX line ", statement_->line, ": not known here, ", what, ": ", statement_->text));
}

bool Decoder::Has(const char* part) const {
  return std::find(opcode().begin(), opcode().end(), part) != opcode().end();
}

const OperandText& Decoder::operand(size_t n) const {
  if (n >= statement_->operands.size()) Unknown("number of operands");
  return statement_->operands[n];
}

Space Decoder::space() const {
  if (Has("global")) return kGlobal;
  if (Has("shared") || Has("shared::cta")) return kShared;
  if (Has("param")) return kParam;
  if (Has("local")) return kLocal;
  if (Has("const")) return kConst;
  return kGeneric;
}

int Decoder::label(const OperandText& o) const {
  const auto found = kernel_->entry->labels.find(o.name);
  if (found == kernel_->entry->labels.end()) Unknown("label");
  return found->second;
}

uint64_t Decoder::symbol(const std::string& name) const {
  const auto found = kernel_->symbols.find(name);
  if (found == kernel_->symbols.end()) Unknown("symbol " + name);
  return found->second;
}

Slot Decoder::RegisterSlot(int reg) const {
  Slot s;
  s.reg = reg;
  s.offset = kernel_->register_offsets[static_cast<size_t>(reg)];
  s.bytes = kernel_->entry->registers[static_cast<size_t>(reg)].bytes;
  return s;
}

Slot Decoder::Constant(uint64_t bits, int bytes) {
  auto block = std::make_unique<uint64_t[]>(kLanes);
  auto* raw = reinterpret_cast<uint8_t*>(block.get());
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(raw + lane * bytes, &bits, static_cast<size_t>(bytes));
  }
  Slot s;
  s.bytes = bytes;
  s.constant = raw;
  kernel_->constants.push_back(std::move(block));
  return s;
}

Slot Decoder::Source(const OperandText& o, int bytes) {
  switch (o.kind) {
    case OperandText::kRegister: {
      const Slot s = RegisterSlot(o.reg);
      if (bytes != 0 && s.bytes != bytes) Unknown("width of a register");
      return s;
    }
    case OperandText::kImmediate:
      return Constant(o.bits, bytes == 0 ? 4 : bytes);
    case OperandText::kSymbol:
      return Constant(symbol(o.name) + static_cast<uint64_t>(o.offset), 8);
    default:
      Unknown("operand");
  }
}

void Decoder::PushResult(const Slot& s) {
  if (now_->dsts == std::ssize(now_->dst)) Unknown("number of results");
  now_->dst[now_->dsts++] = s;
}

void Decoder::PushSource(const Slot& s) {
  if (now_->srcs == std::ssize(now_->src)) Unknown("number of sources");
  now_->src[now_->srcs++] = s;
}

void Decoder::AddResult(const OperandText& o, int bytes) {
  Slot s;
  if (o.kind == OperandText::kRegister) {
    s = RegisterSlot(o.reg);
    if (bytes != 0 && s.bytes != bytes) Unknown("width of a result");
  } else if (o.kind != OperandText::kSink) {
    Unknown("result");
  }
  PushResult(s);
}

void Decoder::AddSecondResult(const OperandText& o) {
  if (o.second >= 0) PushResult(RegisterSlot(o.second));
}

void Decoder::AddSource(const OperandText& o, int bytes) { PushSource(Source(o, bytes)); }

void Decoder::AddPredicate(const OperandText& o) {
  if (o.kind == OperandText::kImmediate) return AddConstant(o.bits != 0 ? kAllLanes : 0, 4);
  if (o.kind != OperandText::kRegister) Unknown("predicate");
  Slot s = RegisterSlot(o.reg);
  s.negated = o.negated;
  PushSource(s);
}

void Decoder::AddConstant(uint64_t bits, int bytes) { PushSource(Constant(bits, bytes)); }

void Decoder::AddStored(const OperandText& o, int bytes) {
  if (o.kind == OperandText::kImmediate) return AddConstant(o.bits, std::max(2, bytes));
  if (o.kind != OperandText::kRegister) Unknown("what is stored");
  const Slot s = RegisterSlot(o.reg);
  if (s.bytes < bytes) Unknown("width of what is stored");
  PushSource(s);
}

void Decoder::AddResults(const OperandText& o, int bytes) {
  if (o.kind != OperandText::kVector) return AddResult(o, bytes);
  for (const OperandText& one : o.parts) AddResult(one, bytes);
}

void Decoder::AddSources(const OperandText& o, int bytes) {
  if (o.kind != OperandText::kVector) return AddSource(o, bytes);
  for (const OperandText& one : o.parts) AddSource(one, bytes);
}

bool Decoder::AddAddress(const OperandText& o, int64_t* offset) {
  if (o.kind != OperandText::kAddress) Unknown("address");
  *offset = o.offset;
  if (o.reg >= 0) {
    PushSource(RegisterSlot(o.reg));
    return true;
  }
  if (!o.name.empty()) *offset += static_cast<int64_t>(symbol(o.name));
  return false;
}

void Decoder::AddMembers(const OperandText& o) {
  now_->together = Together::kMembers;
  now_->members = Source(o, 4);
}

void Decoder::Use(const Operation& operation) {
  if (operands() != operation.sources.size() + 1) Unknown("number of operands");
  now_->run = operation.run;
  now_->mode = operation.mode;
  AddResult(operand(0), operation.result);
  size_t n = 1;
  for (const int bytes : operation.sources) AddSource(operand(n++), bytes);
}

}  // namespace kvant::ptxemu
