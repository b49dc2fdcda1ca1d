// What host and device must agree on for a forward kernel. Includes nothing; NVRTC and the host's compiler both read
// it.
#pragma once

// How a kernel cuts the problem. A value of this type is the kernel's only template parameter.
struct ForwardTile {
  int head_dim, head_dim_v;
  int warpgroups;  // that compute; each has 64 queries
  int keys;        // of one step
  int stages;      // steps of keys, and of values, that are in shared memory at once
  bool turns;      // warpgroups issue their products in turns (ping-pong)
  bool f16;        // elements are float16, else bfloat16
  bool causal;

  constexpr int queries() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // A place of its own for the result lets the next tile's queries come in early; at head_dim 256 there is no room.
  constexpr bool result_apart() const { return head_dim_v <= 128; }
  // Queries in registers spare the tensor core reads of shared memory, where registers suffice.
  constexpr bool queries_in_registers() const { return head_dim <= 64 || (head_dim <= 128 && warpgroups == 2); }
  constexpr int shared_bytes() const {
    return 2 * (queries() * (head_dim + (result_apart() ? head_dim_v : 0)) + stages * keys * (head_dim + head_dim_v)) +
           1024;
  }
};
