// palctl: see `palctl --help`.
#include <unistd.h>

#include <iostream>

#include "tools/palctl/commands.h"

int main(int argc, char** argv) {
  const bool interactive = isatty(STDIN_FILENO) == 1 && isatty(STDOUT_FILENO) == 1;
  return palimpsest::palctl::RunPalctl(argc, argv, {std::cout, std::cerr, interactive});
}
