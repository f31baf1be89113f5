// Prints p50 and p99 of round trips on the broker's control socket in microseconds.
#include <cstdio>
#include <cstdlib>

#include "broker/server/testing/control_latency.h"

int main() {
  const auto latencies = palimpsest::MeasureControlLatency(/*rounds=*/5000);
  if (!latencies.ok()) {
    std::fprintf(stderr, "%s\n", latencies.status().ToString().c_str());
    return EXIT_FAILURE;
  }
  for (const palimpsest::ControlLatency& latency : *latencies) {
    std::printf("%-28s p50 %7.1f us   p99 %7.1f us\n", latency.name.c_str(),
                absl::ToDoubleMicroseconds(latency.p50), absl::ToDoubleMicroseconds(latency.p99));
  }
  return EXIT_SUCCESS;
}
