// PALIMPSEST_CHECK(condition): aborts with the condition and its place if it does not hold, in
// every build. For invariants of our own code, never for what comes from outside.
#ifndef PALIMPSEST_WORKER_CORE_CHECK_H_
#define PALIMPSEST_WORKER_CORE_CHECK_H_

#include <cstdio>
#include <cstdlib>

#define PALIMPSEST_CHECK(condition)                                                          \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: invariant broken: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)

#endif  // PALIMPSEST_WORKER_CORE_CHECK_H_
