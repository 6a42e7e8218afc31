#include "kvant/tests/ptxemu/ptx_text.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <unordered_map>

#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

int BytesOfType(const std::string& t) {
  if (t == "pred") return 4;
  size_t i = 1;
  while (i < t.size() && !isdigit(static_cast<unsigned char>(t[i]))) ++i;
  const int bits = std::atoi(t.c_str() + i);
  if (t == "f16x2" || t == "bf16x2") return 4;
  return bits / 8;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  ModuleText Parse() {
    ModuleText module;
    while (Skip()) {
      const std::string word = PeekWord();
      if (word == ".version" || word == ".target" || word == ".address_size") {
        at_ = text_.find('\n', at_);
      } else if (word == ".visible" || word == ".extern" || word == ".weak" || word == ".common") {
        Word();
      } else if (word == ".entry") {
        Word();
        module.entries.push_back(ParseEntry());
      } else if (word == ".func") {
        Fail("functions are not known here");
      } else if (word == ".global" || word == ".const" || word == ".shared") {
        for (Variable& v : ParseVariables()) module.variables.push_back(std::move(v));
      } else {
        Fail("unexpected '" + word + "'");
      }
    }
    return module;
  }

 private:
  [[noreturn]] void Fail(const std::string& why) const {
    throw std::runtime_error(StrCat("PTX line ", line_, ": ", why));
  }

  // To the next thing that is neither space nor comment; false at the end.
  bool Skip() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (c == '\0') return false;
      if (isspace(static_cast<unsigned char>(c))) {
        ++at_;
      } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '/') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '*') {
        const size_t end = text_.find("*/", at_);
        if (end == std::string::npos) Fail("a comment without end");
        line_ += static_cast<int>(std::count(text_.begin() + static_cast<int64_t>(at_),
                                             text_.begin() + static_cast<int64_t>(end), '\n'));
        at_ = end + 2;
      } else {
        return true;
      }
    }
    return false;
  }
  static bool IsWord(char c) {
    return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
  }
  std::string PeekWord() {
    Skip();
    size_t end = at_;
    while (end < text_.size() && IsWord(text_[end])) ++end;
    if (end == at_) Fail(std::string("unexpected '") + text_[at_] + "'");
    return text_.substr(at_, end - at_);
  }
  std::string Word() {
    const std::string word = PeekWord();
    at_ += word.size();
    return word;
  }
  bool Take(char c) {
    if (!Skip() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void Need(char c) {
    if (!Take(c))
      Fail(std::string("'") + c + "' is missing before '" + text_.substr(at_, 20) + "'");
  }
  int64_t Number() {
    const std::string word = Word();
    return std::strtoll(word.c_str(), nullptr, 0);
  }

  static bool IsNumber(const std::string& w) {
    return !w.empty() && isdigit(static_cast<unsigned char>(w[0]));
  }
  static uint64_t BitsOf(const std::string& w) {
    if (w.size() > 2 && w[0] == '0' && (w[1] == 'f' || w[1] == 'F' || w[1] == 'd' || w[1] == 'D')) {
      return std::strtoull(w.c_str() + 2, nullptr, 16);
    }
    return std::strtoull(w.c_str(), nullptr, 0);
  }

  // ".global .align 4 .u32 a = 1, b[4] = {..};" and parameters, which end without ';'.
  std::vector<Variable> ParseVariables(bool parameter = false) {
    Variable base;
    base.space = Word().substr(1);
    int element = 0;
    for (;;) {
      const std::string word = PeekWord();
      if (word[0] != '.') break;
      Word();
      if (word == ".align") {
        base.align = Number();
      } else if (word == ".ptr" || word == ".global" || word == ".const" || word == ".shared") {
        // What a parameter points to.
      } else {
        element = BytesOfType(word.substr(1));
        if (element == 0) Fail("type " + word);
      }
    }
    if (base.align < element) base.align = element;
    std::vector<Variable> found;
    do {
      Variable v = base;
      v.name = Word();
      v.bytes = element;
      bool array = false;
      while (Take('[')) {
        if (Take(']')) {
          v.unsized = true;
          v.bytes = 0;
        } else {
          v.bytes = (array ? v.bytes : element) * Number();
          Need(']');
        }
        array = true;
      }
      if (Take('=')) {
        const bool braces = Take('{');
        do {
          Skip();
          const bool minus = Take('-');
          uint64_t bits = BitsOf(Word());
          if (minus) bits = -bits;
          for (int i = 0; i < element; ++i) v.init.push_back(static_cast<uint8_t>(bits >> (8 * i)));
        } while (braces && Take(','));
        if (braces) Need('}');
      }
      found.push_back(std::move(v));
    } while (!parameter && Take(','));
    if (!parameter) Need(';');
    return found;
  }

  Entry ParseEntry() {
    entry_ = Entry();
    scopes_.assign(1, {});
    entry_.name = Word();
    if (Take('(')) {
      while (!Take(')')) {
        for (Variable& v : ParseVariables(true)) entry_.params.push_back(std::move(v));
        Take(',');
      }
    }
    while (!Take('{')) {
      const std::string word = Word();
      if (word == ".maxntid" || word == ".reqntid") {
        entry_.max_threads = static_cast<int>(Number());
        while (Take(',')) entry_.max_threads *= static_cast<int>(Number());
      } else if (word == ".minnctapersm") {
        entry_.min_blocks = static_cast<int>(Number());
      } else {
        Fail("directive " + word);
      }
    }
    int depth = 1;
    while (depth > 0) {
      Skip();
      if (Take('{')) {
        ++depth;
        scopes_.emplace_back();
      } else if (Take('}')) {
        --depth;
        scopes_.pop_back();
      } else {
        ParseStatement();
      }
    }
    return std::move(entry_);
  }

  void ParseStatement() {
    Skip();
    const size_t begin = at_;
    Statement s;
    s.line = line_;
    if (text_[at_] == '@') {
      ++at_;
      s.guard_negated = Take('!');
      s.guard = RegisterOf(Word());
    }
    std::string word = Word();
    if (word == ".reg") return ParseRegisters();
    if (word == ".local" || word == ".shared") {
      at_ -= word.size();
      for (Variable& v : ParseVariables()) entry_.variables.push_back(std::move(v));
      return;
    }
    if (word == ".pragma" || word == ".loc" || word == ".file") {
      at_ = text_.find(word == ".pragma" ? ';' : '\n', at_) + 1;
      return;
    }
    if (Take(':')) {
      entry_.labels[word] = static_cast<int>(entry_.statements.size());
      return;
    }
    for (size_t i = 0; i <= word.size();) {
      const size_t dot = std::min(word.find('.', i), word.size());
      s.opcode.push_back(word.substr(i, dot - i));
      i = dot + 1;
    }
    if (!Take(';')) {
      do s.operands.push_back(ParseOperand());
      while (Take(','));
      Need(';');
    }
    s.text = text_.substr(begin, at_ - begin);
    entry_.statements.push_back(std::move(s));
  }

  void ParseRegisters() {
    const std::string type = Word().substr(1);
    do {
      const std::string name = Word();
      if (Take('<')) {
        const int64_t count = Number();
        Need('>');
        for (int64_t i = 0; i < count; ++i) Declare(name + std::to_string(i), type);
      } else {
        Declare(name, type);
      }
    } while (Take(','));
    Need(';');
  }
  void Declare(const std::string& name, const std::string& type) {
    scopes_.back()[name] = static_cast<int>(entry_.registers.size());
    entry_.registers.push_back({BytesOfType(type), type == "pred"});
  }
  int FindRegister(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->find(name);
      if (found != scope->end()) return found->second;
    }
    return -1;
  }
  int RegisterOf(const std::string& name) const {
    const int reg = FindRegister(name);
    if (reg < 0) Fail("no register " + name);
    return reg;
  }

  OperandText ParseOperand() {
    OperandText o;
    Skip();
    if (Take('{')) {
      o.kind = OperandText::kVector;
      do o.parts.push_back(ParseOperand());
      while (Take(','));
      Need('}');
      return o;
    }
    if (Take('[')) {
      o.kind = OperandText::kAddress;
      const std::string base = Word();
      if (IsNumber(base)) {
        o.offset = static_cast<int64_t>(BitsOf(base));
      } else {
        o.reg = FindRegister(base);
        if (o.reg < 0) o.name = base;
      }
      while (Skip() && (text_[at_] == '+' || text_[at_] == '-')) {
        const int64_t sign = text_[at_++] == '-' ? -1 : 1;
        const int64_t inner = Take('-') ? -1 : 1;
        o.offset += sign * inner * static_cast<int64_t>(BitsOf(Word()));
      }
      Need(']');
      return o;
    }
    if (Take('!')) {
      o = ParseOperand();
      o.negated = true;
      return o;
    }
    if (Take('-')) {
      o.kind = OperandText::kImmediate;
      o.bits = -BitsOf(Word());
      return o;
    }
    const std::string word = Word();
    if (IsNumber(word)) {
      o.kind = OperandText::kImmediate;
      o.bits = BitsOf(word);
      return o;
    }
    if (word == "_") return o;
    o.reg = FindRegister(word);
    if (o.reg >= 0) {
      o.kind = OperandText::kRegister;
      if (Take('|')) {
        const std::string second = Word();
        o.second = second == "_" ? -1 : RegisterOf(second);
      }
      return o;
    }
    o.name = word;
    if (word[0] == '%') {
      o.kind = OperandText::kSpecial;
    } else {
      o.kind = word[0] == '$' ? OperandText::kLabel : OperandText::kSymbol;
      while (Skip() && text_[at_] == '+') {
        ++at_;
        o.offset += static_cast<int64_t>(BitsOf(Word()));
      }
    }
    return o;
  }

  const std::string& text_;
  size_t at_ = 0;
  int line_ = 1;
  Entry entry_;
  std::vector<std::unordered_map<std::string, int>> scopes_;  // registers by name
};

}  // namespace

ModuleText ParsePtx(const std::string& text) { return Parser(text).Parse(); }

}  // namespace kvant::ptxemu
