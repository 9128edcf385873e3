// The error channel of the C interface: a status code and a message of this thread.
#pragma once

#include "vegas_ops/api.h"

namespace vegas_ops {

// Stores the printf-formatted message for vegas_last_error() and returns `status`.
int fail(VegasStatus status, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace vegas_ops

// Argument check of the C interface: returns VEGAS_INVALID_ARGUMENT from the enclosing function.
#define VEGAS_CHECK(condition, ...)                                                  \
  do {                                                                               \
    if (!(condition)) return ::vegas_ops::fail(VEGAS_INVALID_ARGUMENT, __VA_ARGS__); \
  } while (0)
