#include "kvant/kernels/device/simt_execution.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

namespace kvant::simt {

constinit thread_local Thread* current_thread = nullptr;

namespace {

thread_local std::vector<std::unique_ptr<Worker>> workers;

constexpr int kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 * 1024;

// "threads 0-31, 40".
std::string ThreadsToString(const std::vector<int>& threads) {
  std::string text = threads.size() == 1 ? "thread " : "threads ";
  for (size_t i = 0; i < threads.size();) {
    size_t last = i;
    while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += std::to_string(threads[i]);
    if (last > i) text.append("-").append(std::to_string(threads[last]));
    i = last + 1;
  }
  return text;
}

bool SameSite(Site a, Site b) {
  // Each translation unit has its own copy of a file's name.
  return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

std::string WrongShape(const LaunchShape& shape) {
  if (shape.blocks < 1) return "a launch of " + std::to_string(shape.blocks) + " blocks";
  if (shape.threads < kLanes || shape.threads > kMaxThreads || shape.threads % kLanes != 0) {
    return "a launch of " + std::to_string(shape.threads) +
           " threads per block, which is not a multiple of 32 up to 1024";
  }
  if (shape.shared_bytes > kMaxSharedBytes) {
    return "a launch with " + std::to_string(shape.shared_bytes) +
           " bytes of shared memory, more than any GPU has";
  }
  return "";
}

}  // namespace

Report Launch(const LaunchShape& shape, const Options& options, const std::function<void()>& body) {
  std::string wrong = WrongShape(shape);
  if (current_thread != nullptr) wrong = "a launch from within a kernel";
  if (!wrong.empty()) {
    Report report;
    report.errors.push_back({Check::kArgument, std::move(wrong)});
    return report;
  }
  return Execution(shape, options, body).Run();
}

Execution::Execution(const LaunchShape& shape, const Options& options,
                     const std::function<void()>& body)
    : shape_(shape),
      options_(options),
      body_(body),
      shared_(shape.shared_bytes, options.races, &errors_),
      global_(&errors_),
      warps_(shape.threads / kLanes),
      threads_(shape.threads),
      ready_(shape.threads),
      random_(options.seed) {
  for (int i = 0; i < shape.threads; ++i) {
    Thread& t = threads_[i];
    t.index = i;
    t.lane = i % kLanes;
    t.warp = &warps_[i / kLanes];
    t.execution = this;
    if (i == static_cast<int>(workers.size())) workers.push_back(std::make_unique<Worker>());
    workers[i]->thread = &t;
    t.fiber = &workers[i]->fiber;
  }
  for (const Range& watch : options.watches) report_.reads.emplace_back(watch.bytes);
}

Report Execution::Run() {
  std::vector<int64_t> order(shape_.blocks);
  std::iota(order.begin(), order.end(), 0);
  if (options_.seed != 0) {
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_() % i]);
  }
  for (const int64_t block : order) {
    RunBlock(block);
    if (!stopped_) continue;
    workers.clear();  // some are in the middle of a thread
    break;
  }
  report_.errors = errors_.Take();
  return std::move(report_);
}

void Execution::RunBlock(int64_t block) {
  block_ = block;
  ++block_barriers_;
  exited_ = 0;
  at_barrier_ = 0;
  shared_.BeginBlock({block_barriers_, 0});
  global_.BeginBlock();
  for (Thread& t : threads_) {
    t.exited = false;
    t.copies.clear();
    t.group_ends.clear();
    t.bytes_in_flight = 0;
    t.most_bytes_in_flight = 0;
    MakeReady(&t);
  }
  Thread* first = TakeReady();
  current_thread = first;
  main_.SwitchTo(*first->fiber);
  current_thread = nullptr;

  global_.EndBlock();
  uint64_t in_flight = 0;
  for (const Thread& t : threads_) in_flight += t.most_bytes_in_flight;
  counters().copy_bytes_in_flight = std::max(counters().copy_bytes_in_flight, in_flight);
  for (Warp& warp : warps_) warp.traffic.Flush(&counters());
}

Worker::Worker() : fiber(&Execution::RunThreads, this) {}

void Execution::RunThreads(void* worker) {
  for (;;) {
    Thread* t = static_cast<Worker*>(worker)->thread;
    Execution& execution = *t->execution;
    execution.body_();
    t->exited = true;
    if (++execution.exited_ == execution.shape_.threads) {
      t->fiber->SwitchTo(execution.main_);
    } else {
      execution.Suspend(t);
    }
  }
}

void Execution::MakeReady(Thread* t) {
  t->waits_in = nullptr;
  ready_[(ready_begin_ + ready_count_++) % ready_.size()] = t;
}

Thread* Execution::TakeReady() {
  if (ready_count_ == 0) return nullptr;
  Thread*& first = ready_[ready_begin_];
  if (options_.seed != 0) {
    std::swap(first, ready_[(ready_begin_ + random_() % ready_count_) % ready_.size()]);
  }
  --ready_count_;
  ready_begin_ = (ready_begin_ + 1) % ready_.size();
  return first;
}

void Execution::Suspend(Thread* t) {
  Thread* next = TakeReady();
  if (next == nullptr) {
    ReportDeadlock();
    Stop(t);
  }
  if (next == t) return;
  current_thread = next;
  t->fiber->SwitchTo(*next->fiber);
}

void Execution::Stop(Thread* t) {
  stopped_ = true;
  t->fiber->SwitchTo(main_);
  abort();
}

void Execution::BlockBarrier(Thread* t, Site site) {
  if (at_barrier_ == 0) {
    barrier_site_ = site;
  } else if (!SameSite(site, barrier_site_)) {
    ReportDivergence(*t, "BlockSync", site, "BlockSync", barrier_site_);
    Stop(t);
  }
  if (++at_barrier_ < shape_.threads) {
    t->waits_in = "BlockSync";
    t->waits_at = site;
    return Suspend(t);
  }
  at_barrier_ = 0;
  ++block_barriers_;
  ++counters().block_barriers;
  for (Warp& warp : warps_) warp.traffic.Flush(&counters());
  for (Thread& other : threads_) {
    if (&other != t) MakeReady(&other);
  }
}

bool Execution::Arrive(Thread* t, const char* collective, Site site, void* argument) {
  Warp& warp = *t->warp;
  if (warp.arrived == 0) {
    warp.collective = collective;
    warp.site = site;
  } else if (warp.collective != collective || !SameSite(site, warp.site)) {
    ReportDivergence(*t, collective, site, warp.collective, warp.site);
    Stop(t);
  }
  warp.arguments[t->lane] = argument;
  warp.arrived |= 1u << t->lane;
  if (warp.arrived == ~0u) {
    warp.traffic.Flush(&counters());
    return true;
  }
  t->waits_in = collective;
  t->waits_at = site;
  Suspend(t);
  return false;
}

void Execution::Release(Warp* warp) {
  warp->arrived = 0;
  Thread* lanes = &threads_[(warp - warps_.data()) * kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lanes[lane].waits_in != nullptr) MakeReady(&lanes[lane]);
  }
}

void Execution::ReportDivergence(const Thread& t, const char* what, Site site,
                                 const char* other_what, Site other_site) {
  const Actor actor = ActorOf(t, site);
  errors_.Add(Check::kDivergence, Errors::Describe(actor) + " comes to " + what + " at " +
                                      ToString(site) + ", where others wait in " + other_what +
                                      " at " + ToString(other_site));
}

void Execution::ReportDeadlock() {
  std::map<std::string, std::vector<int>> states;
  for (const Thread& t : threads_) {
    const std::string state =
        t.exited ? "exited"
                 : std::string("waiting in ") + t.waits_in + " at " + ToString(t.waits_at);
    states[state].push_back(t.index);
  }
  std::string message = "block " + std::to_string(block_) + " cannot go on:";
  const char* separator = " ";
  for (const auto& [state, threads] : states) {
    message += separator + ThreadsToString(threads) + " " + state;
    separator = "; ";
  }
  errors_.Add(Check::kDeadlock, message);
}

bool Execution::BeginGlobal(Thread* t, const void* at, size_t bytes, const char* does, Site site) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  if (!options_.buffers.empty()) {
    const auto holds = [&](const Range& r) {
      const auto base = reinterpret_cast<uintptr_t>(r.base);
      return address >= base && bytes <= r.bytes && address - base <= r.bytes - bytes;
    };
    if (std::none_of(options_.buffers.begin(), options_.buffers.end(), holds)) {
      errors_.Add(
          Check::kBounds, ActorOf(*t, site),
          std::string(does) + " " + std::to_string(bytes) + " bytes " + NearestBuffer(address));
      return false;
    }
  }
  return true;
}

void Execution::CheckAlignment(Thread* t, const void* at, size_t bytes, const char* does,
                               Site site) {
  if (reinterpret_cast<uintptr_t>(at) % bytes == 0) return;
  errors_.Add(Check::kAlignment, ActorOf(*t, site),
              std::string(does) + " " + std::to_string(bytes) + " bytes at an address " +
                  std::to_string(reinterpret_cast<uintptr_t>(at) % bytes) +
                  " bytes beyond one that is aligned to them,");
}

std::string Execution::NearestBuffer(uintptr_t address) const {
  // The last one that begins at or before the address: most overruns are small.
  const Range* nearest = nullptr;
  for (const Range& r : options_.buffers) {
    if (reinterpret_cast<uintptr_t>(r.base) > address) continue;
    if (nearest == nullptr || r.base > nearest->base) nearest = &r;
  }
  if (nearest == nullptr) return "before all buffers";
  return "at byte " + std::to_string(address - reinterpret_cast<uintptr_t>(nearest->base)) +
         " of buffer " + std::to_string(nearest - options_.buffers.data()) + ", which has " +
         std::to_string(nearest->bytes) + " bytes,";
}

void Execution::CountReads(const void* from, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  for (size_t i = 0; i < options_.watches.size(); ++i) {
    const auto base = reinterpret_cast<uintptr_t>(options_.watches[i].base);
    std::vector<uint32_t>& reads = report_.reads[i];
    for (uintptr_t a = std::max(address, base); a < address + bytes && a - base < reads.size();
         ++a) {
      ++reads[a - base];
    }
  }
}

void Execution::StartCopy(Thread* t, const Copy& copy) {
  const Actor actor = ActorOf(*t, copy.site);
  if ((copy.bytes != 4 && copy.bytes != 8 && copy.bytes != 16) || copy.valid > copy.bytes) {
    errors_.Add(Check::kArgument, actor,
                "copies " + std::to_string(static_cast<int64_t>(copy.valid)) + " of " +
                    std::to_string(static_cast<int64_t>(copy.bytes)) + " bytes");
    return;
  }
  Copy pending = copy;
  CheckAlignment(t, copy.from, copy.bytes, "copies", copy.site);
  if (copy.valid > 0) {
    if (BeginGlobal(t, copy.from, copy.valid, "copies", copy.site)) {
      if (options_.races) {
        global_.Load(reinterpret_cast<uintptr_t>(copy.from), copy.valid, actor, MomentOf(*t),
                     /*coherent=*/true);
      }
      // What may not be read fails here, at the line that asks for it.
      unsigned char probe[16];
      memcpy(probe, copy.from, copy.valid);
      asm volatile("" ::"r"(probe) : "memory");
      CountReads(copy.from, copy.valid);
    } else {
      pending.valid = 0;
    }
  }
  if (options_.count) {
    t->warp->traffic.Add(WarpTraffic::Kind::kCopy, copy.site, t->lane, copy.bytes,
                         reinterpret_cast<uintptr_t>(copy.from), copy.to, copy.valid > 0);
  }
  if (shared_.StartCopy(copy.to, copy.bytes, actor, MomentOf(*t)) == nullptr) return;
  t->copies.push_back(pending);
  t->bytes_in_flight += copy.bytes;
  t->most_bytes_in_flight = std::max(t->most_bytes_in_flight, t->bytes_in_flight);
}

void Execution::WaitForCopies(Thread* t, size_t pending) {
  if (t->group_ends.size() <= pending) return;
  const size_t groups = t->group_ends.size() - pending;
  const size_t done = t->group_ends[groups - 1];
  for (size_t i = 0; i < done; ++i) {
    const Copy& copy = t->copies[i];
    unsigned char* to =
        shared_.FinishCopy(copy.to, copy.bytes, ActorOf(*t, copy.site), MomentOf(*t));
    memcpy(to, copy.from, copy.valid);
    memset(to + copy.valid, 0, copy.bytes - copy.valid);
    t->bytes_in_flight -= copy.bytes;
  }
  t->copies.erase(t->copies.begin(), t->copies.begin() + static_cast<ptrdiff_t>(done));
  t->group_ends.erase(t->group_ends.begin(),
                      t->group_ends.begin() + static_cast<ptrdiff_t>(groups));
  for (size_t& end : t->group_ends) end -= done;
}

}  // namespace kvant::simt
