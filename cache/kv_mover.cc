#include "kvant/cache/kv_mover.h"

#include <vector>

#include "kvant/graph/status.h"

namespace kvant {
namespace {

bool BeginAtByte(const KvElements& e) {
  const int64_t bits = BitsOf(e.type);
  return e.first * bits % 8 == 0 && e.pitch * bits % 8 == 0;
}

// The bytes that have elements first, first + 1, ... of an array, on the host.
class HostCopy {
 public:
  HostCopy(const KvElements& e, int64_t count)
      : type_(e.type),
        begin_(e.first * BitsOf(e.type) / 8),
        at_(e.data + begin_),
        first_(e.first - begin_ * 8 / BitsOf(e.type)),
        bytes_(BytesFor(e.type, e.first + count) - begin_) {}
  absl::Status Fetch(DeviceMemory& memory) {
    return memory.CopyToHost(bytes_.data(), at_, bytes_.size());
  }
  absl::Status PutBack(DeviceMemory& memory) const {
    return memory.CopyFromHost(at_, bytes_.data(), bytes_.size());
  }
  double Load(int64_t i) const { return LoadElement(type_, bytes_.data(), first_ + i); }
  void Store(int64_t i, double value) { StoreElement(type_, bytes_.data(), first_ + i, value); }

 private:
  const DataType type_;
  const int64_t begin_;
  std::byte* const at_;
  const int64_t first_;
  std::vector<std::byte> bytes_;
};

}  // namespace

absl::Status KvMover::Move(const KvElements& from, const KvElements& to, int64_t rows,
                           int64_t count, bool exchange) const {
  const int64_t bits = BitsOf(from.type);
  if (BeginAtByte(from) && BeginAtByte(to) && count * bits % 8 == 0) {
    const auto bytes = [](std::byte* at) { return reinterpret_cast<unsigned char*>(at); };
    CacheCopy copy;
    copy.from = bytes(from.data + from.first * bits / 8);
    copy.to = bytes(to.data + to.first * bits / 8);
    copy.from_pitch = from.pitch * bits / 8;
    copy.to_pitch = to.pitch * bits / 8;
    copy.bytes = count * bits / 8;
    copy.rows = rows;
    copy.exchange = exchange ? 1 : 0;
    return kernels_.Run(copy, stream_.native());
  }
  KVANT_RETURN_IF_ERROR(memory_.Synchronize(stream_.native()));
  for (int64_t row = 0; row < rows; ++row) {
    KvElements a = from, b = to;
    a.first += row * from.pitch;
    b.first += row * to.pitch;
    KVANT_RETURN_IF_ERROR(MoveOnHost(a, b, count, exchange));
  }
  return absl::OkStatus();
}

absl::Status KvMover::MoveOnHost(const KvElements& from, const KvElements& to, int64_t count,
                                 bool exchange) const {
  HostCopy source(from, count);
  KVANT_RETURN_IF_ERROR(source.Fetch(memory_));
  std::vector<double> moved(count);
  for (int64_t i = 0; i < count; ++i) moved[i] = source.Load(i);
  if (exchange) {
    HostCopy other(to, count);
    KVANT_RETURN_IF_ERROR(other.Fetch(memory_));
    for (int64_t i = 0; i < count; ++i) source.Store(i, other.Load(i));
    KVANT_RETURN_IF_ERROR(source.PutBack(memory_));
  }
  // Fetched now: both may share a byte.
  HostCopy target(to, count);
  KVANT_RETURN_IF_ERROR(target.Fetch(memory_));
  for (int64_t i = 0; i < count; ++i) target.Store(i, moved[i]);
  return target.PutBack(memory_);
}

}  // namespace kvant
