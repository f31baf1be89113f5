"""Points @cache at what tools/setup downloads: Python, the small real model, third-party sources."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

# SmolLM2-135M-Instruct as a Hugging Face folder.
filegroup(name = "smollm2", srcs = glob(["smollm2/*"]))

exports_files(["smollm2/tokenizer.json", "smollm2/tokenizer_config.json", "smollm2/config.json"])

# llama.cpp's Jinja engine (MIT): #include "common/jinja/...".
cc_library(
    name = "jinja",
    srcs = glob(["jinja/common/jinja/*.cpp", "jinja/common/*.cpp"], exclude = ["**/caps.cpp"]),
    hdrs = glob(["jinja/common/jinja/*.h"]),
    textual_hdrs = ["jinja/common/json.h", "jinja/common/unicode.h", "ggml.h"],
    includes = ["jinja"],
    copts = ["-w", "-O1", "-Iexternal/cache", "-Iexternal/cache/jinja/common"],
)
"""

# The one thing that the engine's JSON wrapper takes from the rest of its project.
_GGML = """#pragma once
#include <cstdlib>
#define GGML_ASSERT(condition) do { if (!(condition)) std::abort(); } while (0)
"""

def _cache_configure_impl(ctx):
    root = ctx.os.environ.get("PALIMPSEST_CACHE")
    if not root:
        root = ctx.os.environ["HOME"] + "/.cache/palimpsest"
    parts = {
        "smollm2": root + "/models/SmolLM2-135M-Instruct",
        "jinja": root + "/third_party/jinja",
        "venv": root + "/venv",
    }
    for name, path in parts.items():
        if not ctx.path(path).exists:
            fail("%s is missing: run tools/setup" % path)
        ctx.symlink(path, name)
    flashinfer = root + "/third_party/flashinfer"
    build = _BUILD
    if ctx.path(flashinfer + "/.made-from").exists:
        ctx.symlink(flashinfer + "/.made-from", "flashinfer_version")
        build += "exports_files([\"flashinfer_version\"])\n"
    else:
        flashinfer = None
    ctx.file("ggml.h", _GGML)
    ctx.file("BUILD", build)
    ctx.file(
        "defs.bzl",
        "PYTHON = %r\nFLASHINFER = %r\n" % (root + "/venv/bin/python", flashinfer),
    )

cache_configure = repository_rule(
    implementation = _cache_configure_impl,
    environ = ["HOME", "PALIMPSEST_CACHE"],
    local = True,
)
