// Vectors of the widest kind that an instruction set has, in the compiler's portable notation (GCC and
// Clang, any architecture), and the few functions that attention needs of them.
#pragma once

#include <string.h>

#include <type_traits>
#include <utility>

#include "common/cpu_isa.h"

#ifdef __ASSOCIATIVE_MATH__
#error "attention spells out its order of summation; compile it with -fno-associative-math"
#endif

#define VEGAS_INLINE inline __attribute__((always_inline))

namespace vegas_ops::VEGAS_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float vfloat __attribute__((vector_size(4 * kWidth)));
typedef int32_t vint __attribute__((vector_size(4 * kWidth)));
typedef uint32_t vuint __attribute__((vector_size(4 * kWidth)));
typedef uint16_t vhalf __attribute__((vector_size(2 * kWidth)));
typedef uint8_t vbyte __attribute__((vector_size(kWidth)));

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
struct Fp8E4M3 {
  uint8_t bits;
};

constexpr float kInfinity = __builtin_inff();

VEGAS_INLINE vfloat splat(float x) { return vfloat{} + x; }
VEGAS_INLINE vint splat(int32_t x) { return vint{} + x; }

template <class To, class From>
VEGAS_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector, class Element>
VEGAS_INLINE Vector load_as(const Element* p) {
  Vector v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class Element, class Vector>
VEGAS_INLINE void store(Element* p, const Vector& v) {
  memcpy(p, &v, sizeof v);
}

// Sign, exponent and mantissa of a small float, moved to the places of an fp32. Subnormals are scaled
// by a subtraction, so that processors which flush or trap subnormal fp32 agree with the others.
template <int kMantissa, int kBias>
VEGAS_INLINE vfloat widen(vuint magnitude, vuint sign) {
  const vuint shifted = magnitude << (23 - kMantissa);
  const float smallest = __builtin_ldexpf(1.0f, 1 - kBias);
  const vuint normal = shifted + (uint32_t(127 - kBias) << 23);
  const vuint subnormal = bit_cast<vuint>(bit_cast<vfloat>(shifted + (uint32_t(128 - kBias) << 23)) - splat(smallest));
  return bit_cast<vfloat>(((shifted < (1u << 23)) ? subnormal : normal) | sign);
}

VEGAS_INLINE vfloat load(const float* p) { return load_as<vfloat>(p); }
VEGAS_INLINE vfloat load(const Bf16* p) {
  return bit_cast<vfloat>(__builtin_convertvector(load_as<vhalf>(p), vuint) << 16);
}
VEGAS_INLINE vfloat load(const Fp16* p) {
  const vuint u = __builtin_convertvector(load_as<vhalf>(p), vuint);
  const vuint sign = (u & 0x8000u) << 16;
  const vuint special = ((u & 0x7fffu) << 13) | 0x7f800000u | sign;
  return ((u & 0x7c00u) == 0x7c00u) ? bit_cast<vfloat>(special) : widen<10, 15>(u & 0x7fffu, sign);
}
VEGAS_INLINE vfloat load(const Fp8E4M3* p) {
  const vuint u = __builtin_convertvector(load_as<vbyte>(p), vuint);
  const vfloat value = widen<3, 7>(u & 0x7fu, (u & 0x80u) << 24);
  return ((u & 0x7fu) == 0x7fu) ? splat(__builtin_nanf("")) : value;
}

// The first n < kWidth elements, then zeros.
template <class T>
VEGAS_INLINE vfloat load_partial(const T* p, int n) {
  T buffer[kWidth] = {};
  memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

// To nearest, ties to even; NaN stays NaN.
VEGAS_INLINE vhalf to_bf16(vfloat x) {
  const vuint u = bit_cast<vuint>(x);
  const vuint rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return __builtin_convertvector((x == x) ? rounded : ((u >> 16) | 0x40u), vhalf);
}

VEGAS_INLINE uint16_t to_bf16(float x) {
  const uint32_t u = bit_cast<uint32_t>(x);
  if (x != x) return uint16_t((u >> 16) | 0x40u);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

VEGAS_INLINE uint16_t to_fp16(float x) {
  uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and beyond round to infinity
  if (u < 0x38800000u) {  // subnormal: the last bit of 0.5f is the last bit of an fp16 subnormal
    return uint16_t(sign | (bit_cast<uint32_t>(bit_cast<float>(u) + 0.5f) - 0x3f000000u));
  }
  return uint16_t(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13));
}

template <int... kIndex>
VEGAS_INLINE vfloat shuffle(vfloat a, vfloat b, std::integer_sequence<int, kIndex...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndex...);
#else
  return __builtin_shuffle(a, b, vint{kIndex...});
#endif
}

using Lanes = std::make_integer_sequence<int, kWidth>;

template <int kDistance, int... kLane>
VEGAS_INLINE vfloat swap_lanes(vfloat a, std::integer_sequence<int, kLane...>) {
  return shuffle(a, a, std::integer_sequence<int, (kLane ^ kDistance)...>());
}

template <int kDistance = kWidth / 2>
VEGAS_INLINE float sum(vfloat a) {
  a += swap_lanes<kDistance>(a, Lanes());
  if constexpr (kDistance == 1)
    return a[0];
  else
    return sum<kDistance / 2>(a);
}

template <int kDistance = kWidth / 2>
VEGAS_INLINE float maximum(vfloat a) {
  const vfloat b = swap_lanes<kDistance>(a, Lanes());
  a = (a > b) ? a : b;
  if constexpr (kDistance == 1)
    return a[0];
  else
    return maximum<kDistance / 2>(a);
}

template <int kDistance, int... kLane>
VEGAS_INLINE void exchange(vfloat& a, vfloat& b, std::integer_sequence<int, kLane...>) {
  const vfloat x = a, y = b;
  a = shuffle(x, y, std::integer_sequence<int, ((kLane & kDistance) ? kWidth + kLane - kDistance : kLane)...>());
  b = shuffle(x, y, std::integer_sequence<int, ((kLane & kDistance) ? kWidth + kLane : kLane + kDistance)...>());
}

// In place, a kWidth x kWidth matrix.
template <int kDistance = 1>
VEGAS_INLINE void transpose(vfloat (&a)[kWidth]) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if (!(i & kDistance)) exchange<kDistance>(a[i], a[i + kDistance], Lanes());
  }
  if constexpr (2 * kDistance < kWidth) transpose<2 * kDistance>(a);
}

// exp(x) within 2 units in the last place; 0 below the smallest normal result, the largest finite number
// above the largest, NaN for NaN.
VEGAS_INLINE vfloat exp(vfloat x) {
  const vint vanishes = x < -87.33654f;
  x = (x > 88.72283f) ? splat(88.72283f) : x;
  x = vanishes ? splat(-87.0f) : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vfloat shifted = x * 1.44269504f + magic;
  const vfloat n = shifted - magic;
  const vfloat f = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  vfloat p = splat(0.00139337332f);
  p = p * f + 0.00836323538f;
  p = p * f + 0.0416664642f;
  p = p * f + 0.166665766f;
  p = p * f + 0.5f;
  p = (p * f) * f + (f + 1.0f);
  const vuint scaled = bit_cast<vuint>(p) + (bit_cast<vuint>(shifted) << 23);
  const vfloat result = vanishes ? vfloat{} : bit_cast<vfloat>(scaled);
  return (x == x) ? result : x;
}

VEGAS_INLINE float exp(float x) { return exp(splat(x))[0]; }

VEGAS_INLINE vfloat tanh(vfloat x) {
  const vuint sign = bit_cast<vuint>(x) & 0x80000000u;
  const vfloat y = bit_cast<vfloat>(bit_cast<vuint>(x) & 0x7fffffffu);
  const vfloat z = y * y;
  vfloat p = splat(0.0020647966f);
  p = p * z - 0.00811863844f;
  p = p * z + 0.0216916146f;
  p = p * z - 0.0539485585f;
  p = p * z + 0.133332526f;
  p = p * z - 0.333333328f;
  const vfloat small = (p * z) * y + y;
  const vfloat large = 1.0f - 2.0f / (exp(2.0f * y) + 1.0f);
  const vfloat result = (y < 0.7f) ? small : large;
  return bit_cast<vfloat>(bit_cast<vuint>(result) | sign);
}

}  // namespace vegas_ops::VEGAS_ISA
