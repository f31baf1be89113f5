// The parts of the command line that are about KV blocks and what clients say of them.
#ifndef PALIMPSEST_TOOLS_PALCTL_CACHE_OPTIONS_H_
#define PALIMPSEST_TOOLS_PALCTL_CACHE_OPTIONS_H_

#include <CLI/CLI.hpp>

#include "tools/palctl/commands.h"

namespace palimpsest::palctl {

// Adds to the command `generate`.
void AddRequestHints(CLI::App& generate, GenerateOptions& options);

// Adds commands.
void AddHint(CLI::App& app, HintOptions& options);
void AddEvents(CLI::App& app, EventsOptions& options);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_CACHE_OPTIONS_H_
