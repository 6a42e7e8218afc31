#include <iterator>

#include "kvant/kernels/device/simt.h"

namespace kvant::simt {
namespace {

struct Field {
  const char* name;
  uint64_t Counters::*value;
};
constexpr Field kFields[] = {
    {"global_loads", &Counters::global_loads},
    {"global_load_sectors", &Counters::global_load_sectors},
    {"global_load_sectors_ideal", &Counters::global_load_sectors_ideal},
    {"global_stores", &Counters::global_stores},
    {"global_store_sectors", &Counters::global_store_sectors},
    {"global_store_sectors_ideal", &Counters::global_store_sectors_ideal},
    {"atomics", &Counters::atomics},
    {"fences", &Counters::fences},
    {"shared_loads", &Counters::shared_loads},
    {"shared_load_wavefronts", &Counters::shared_load_wavefronts},
    {"shared_load_wavefronts_ideal", &Counters::shared_load_wavefronts_ideal},
    {"shared_stores", &Counters::shared_stores},
    {"shared_store_wavefronts", &Counters::shared_store_wavefronts},
    {"shared_store_wavefronts_ideal", &Counters::shared_store_wavefronts_ideal},
    {"load_matrices", &Counters::load_matrices},
    {"load_matrix_wavefronts", &Counters::load_matrix_wavefronts},
    {"load_matrix_wavefronts_ideal", &Counters::load_matrix_wavefronts_ideal},
    {"copies", &Counters::copies},
    {"copy_sectors", &Counters::copy_sectors},
    {"copy_sectors_ideal", &Counters::copy_sectors_ideal},
    {"copy_wavefronts", &Counters::copy_wavefronts},
    {"copy_wavefronts_ideal", &Counters::copy_wavefronts_ideal},
    {"copy_bytes_in_flight", &Counters::copy_bytes_in_flight},
    {"mma_f16_k16", &Counters::mma_f16_k16},
    {"mma_f16_k8", &Counters::mma_f16_k8},
    {"mma_bf16_k16", &Counters::mma_bf16_k16},
    {"mma_tf32_k8", &Counters::mma_tf32_k8},
    {"transposes", &Counters::transposes},
    {"shuffles", &Counters::shuffles},
    {"votes", &Counters::votes},
    {"warp_barriers", &Counters::warp_barriers},
    {"block_barriers", &Counters::block_barriers},
};
static_assert(std::size(kFields) * sizeof(uint64_t) == sizeof(Counters));

}  // namespace

std::ostream& operator<<(std::ostream& out, const Counters& counters) {
  const char* separator = "";
  for (const Field& field : kFields) {
    if (counters.*field.value == 0) continue;
    out << separator << field.name << " " << counters.*field.value;
    separator = ", ";
  }
  return out;
}

}  // namespace kvant::simt
