// Which sanitizer this unit is compiled with: GCC and clang say it differently. Other projects'
// headers define __has_feature for GCC, as something that always says no.
#ifndef KVANT_KERNELS_DEVICE_SANITIZER_H_
#define KVANT_KERNELS_DEVICE_SANITIZER_H_

#if defined(__SANITIZE_ADDRESS__)
#define KVANT_ADDRESS_SANITIZER
#elif defined(__SANITIZE_THREAD__)
#define KVANT_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVANT_ADDRESS_SANITIZER
#endif
#if __has_feature(thread_sanitizer)
#define KVANT_THREAD_SANITIZER
#endif
#endif

#endif  // KVANT_KERNELS_DEVICE_SANITIZER_H_
