// The three ops through the C interface alone, without Python: small calls over traps, compared with plain loops in
// double precision. Written for compute-sanitizer, which is slow to start under a framework.
// usage: ops_test [--device cpu|cuda] [--op verify|select|sparse|hostile|all] [--case N]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

static int usage(const char* program) {
  fprintf(stderr, "usage: %s [--device cpu|cuda] [--op verify|select|sparse|hostile|all] [--case N]\n", program);
  return 2;
}

int main(int argc, char** argv) {
  std::string device = "cpu", op = "all";
  int only = -1;
  for (int i = 1; i < argc; i += 2) {
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (!strcmp(argv[i], "--device")) {
      device = value;
    } else if (!strcmp(argv[i], "--op")) {
      op = value;
    } else if (!strcmp(argv[i], "--case")) {
      char* end;
      only = static_cast<int>(strtol(value, &end, 10));
      if (end == value || *end || only < 0) return usage(argv[0]);
    } else {
      return usage(argv[0]);
    }
  }
  const bool all = op == "all";
  const bool known = all || op == "verify" || op == "select" || op == "sparse" || op == "hostile";
  if ((device != "cpu" && device != "cuda") || !known) {
    return usage(argv[0]);
  }
#ifndef WITH_CUDA
  if (device == "cuda") {
    fprintf(stderr, "`--device` must be cpu: this program was built without CUDA\n");
    return 2;
  }
#endif
  native::Session session(device == "cuda" ? VEGAS_CUDA : VEGAS_CPU);
  session.only = only;
  const VegasOp ops[] = {VEGAS_OP_VERIFY, VEGAS_OP_SELECT, VEGAS_OP_SPARSE};
  const char* names[] = {"verify", "select", "sparse"};
  void (*const suites[])(native::Session&) = {native::run_verify, native::run_select, native::run_sparse};
  for (int i = 0; i < 3; ++i) {
    const char* kernels = vegas_kernel_name(ops[i], session.device);
    session.enabled = all || op == names[i];
    if (session.enabled) printf("%s on %s: %s\n", names[i], device.c_str(), kernels ? kernels : "no kernels");
    suites[i](session);
  }
  session.enabled = all || op == "hostile";
  native::run_hostile(session);
  printf("%d cases, %d failed\n", session.ran(), session.failed());
  return session.failed() || !session.ran();
}
