"""Targets that exist only where a CUDA toolkit is (@cuda says so once, while it is set up)."""

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
