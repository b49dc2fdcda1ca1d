// Address windows. Global addresses are the host's. Generic addresses of other spaces are invalid on x86-64 and AArch64
// hosts: their bits 48 to 63 are neither all 0 nor all 1.
#pragma once

#include <cstdint>

namespace tandem::vgpu::machine {

inline constexpr uint64_t kSharedWindow = 0xfff1'0000'0000'0000;  // + rank << 24 | offset
inline constexpr uint64_t kLocalWindow = 0xfff2'0000'0000'0000;   // + offset in the thread's own memory
// The base of generic parameter addresses, plus an offset in the kernel's parameters. Without the window the offset (32
// or 64 bits) is an address of .param.
inline constexpr uint64_t kParamWindow = 0xfff3'0000'0000'0000;
inline constexpr uint64_t kWindowMask = 0xffff'0000'0000'0000;

inline constexpr uint32_t kReservedShared = 0x400;  // user data begins here
inline constexpr int kRankShift = 24;
inline constexpr uint32_t kSharedOffset = (1u << kRankShift) - 1;

inline bool in_window(uint64_t address, uint64_t window) { return (address & kWindowMask) == window; }

}  // namespace tandem::vgpu::machine
