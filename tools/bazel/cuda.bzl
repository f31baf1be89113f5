"""Targets that exist only where a CUDA toolkit is (@cuda says so once, while it is set up)."""

load("@cache//:defs.bzl", "FLASHINFER")
load("@cuda//:defs.bzl", "CUDA_ROOT", "HAVE_CUDA")

def if_cuda(there, elsewhere = []):
    """`there` where a CUDA toolkit is, else `elsewhere`."""
    return there if HAVE_CUDA else elsewhere

def cuda_cc_library(**kwargs):
    if HAVE_CUDA:
        native.cc_library(**kwargs)

def cuda_cc_binary(**kwargs):
    if HAVE_CUDA:
        native.cc_binary(**kwargs)

def cuda_cc_test(**kwargs):
    if HAVE_CUDA:
        native.cc_test(**kwargs)

_FLASHINFER_INCLUDES = [
    "include",
    "cccl/cub",
    "cccl/include",
    "cccl/thrust",
    "cutlass",
    "cutlass_util",
]

def _shared_objects_impl(ctx):
    return [DefaultInfo(files = depset(ctx.files.objects))]

# The same files whatever the configuration: nvcc knows no sanitizer, so builds with one need not repeat its work.
_shared_objects = rule(
    implementation = _shared_objects_impl,
    attrs = {"objects": attr.label_list(cfg = "host", allow_files = [".o"])},
)

def cuda_library(
        name,
        srcs,
        hdrs = [],
        textual_hdrs = [],
        deps = [],
        architectures = ["80", "90a"],
        flashinfer = False,
        visibility = None):
    """A cc_library of .cu files, which nvcc compiles one by one.

    Args:
      name: of the library.
      srcs: .cu files. They include neither Abseil nor gRPC.
      hdrs: headers for hosts.
      textual_hdrs: headers of device code.
      deps: libraries whose headers `hdrs` include.
      architectures: compute capabilities for which machine code is made.
      flashinfer: whether FlashInfer's headers are included.
      visibility: of the library.
    """
    if not HAVE_CUDA:
        return
    if flashinfer and not FLASHINFER:
        fail("FlashInfer's headers are missing: run tools/setup")
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-I.", "--expt-relaxed-constexpr"]
    flags += ["-gencode arch=compute_%s,code=sm_%s" % (a, a) for a in architectures]
    version = []
    if flashinfer:
        # CCCL must come before the toolkit's own, so not with -isystem; hence no warnings.
        flags += ["-w"] + ["-I%s/%s" % (FLASHINFER, folder) for folder in _FLASHINFER_INCLUDES]
        version = ["@cache//:flashinfer_version"]
    objects = []
    for src in srcs:
        object = name + "_" + src[:-len(".cu")] + ".o"
        objects.append(object)
        native.genrule(
            name = object[:-len(".o")] + "_nvcc",
            srcs = [src] + hdrs + textual_hdrs + version,
            outs = [object],
            tags = ["manual"],
            cmd = "%s/bin/nvcc %s -c -o $@ $(location %s)" % (CUDA_ROOT, " ".join(flags), src),
        )
    _shared_objects(name = name + "_objects", objects = objects)
    native.cc_library(
        name = name,
        srcs = [name + "_objects"],
        hdrs = hdrs,
        deps = deps + ["@cuda//:cudart_static"],
        visibility = visibility,
    )

def cuda_fatbin(name, src, hdrs = [], symbol = None, visibility = None):
    """Device code for the driver API: a cc_library with the fat binary of `src` as a byte array.

    Args:
      name: of the library; #include "PACKAGE/NAME.h" declares the array.
      src: the .cu file.
      hdrs: headers that it includes.
      symbol: name of the array, `const unsigned long long SYMBOL[]`; `name` unless given.
      visibility: of the library.
    """
    if not HAVE_CUDA:
        return
    symbol = symbol or name
    architectures = " ".join([
        "-gencode arch=compute_%s,code=sm_%s" % (a, a)
        for a in ["80", "90a"]
    ])
    native.genrule(
        name = name + "_fatbin",
        srcs = [src] + hdrs,
        outs = [name + ".h", name + ".cc"],
        tags = ["generated_header"],
        cmd = "{root}/bin/nvcc -std=c++17 -O3 -I. {architectures} -fatbin -o $(@D)/{name}.fatbin $(location {src}) && ".format(
                  root = CUDA_ROOT,
                  architectures = architectures,
                  name = name,
                  src = src,
              ) +
              "printf 'extern \"C\" const unsigned long long {symbol}[];\\n' > $(@D)/{name}.h && ".format(symbol = symbol, name = name) +
              "{root}/bin/bin2c --name {symbol} --type longlong --const $(@D)/{name}.fatbin > $(@D)/{name}.raw && ".format(root = CUDA_ROOT, symbol = symbol, name = name) +
              "(printf 'extern \"C\" const unsigned long long {symbol}[];\\n'; cat $(@D)/{name}.raw) > $(@D)/{name}.cc && rm $(@D)/{name}.fatbin $(@D)/{name}.raw".format(symbol = symbol, name = name),
    )
    native.cc_library(
        name = name,
        srcs = [name + ".cc"],
        hdrs = [name + ".h"],
        visibility = visibility,
    )
