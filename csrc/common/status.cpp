#include "common/status.h"

#include <cstdarg>
#include <cstdio>

namespace vegas_ops {
namespace {
thread_local char last_error[512] = "";
}

int fail(VegasStatus status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(last_error, sizeof last_error, format, args);
  va_end(args);
  return status;
}

}  // namespace vegas_ops

const char* vegas_last_error(void) { return vegas_ops::last_error; }
