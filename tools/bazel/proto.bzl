"""C++ messages and gRPC stubs from one .proto, with Debian's protoc."""

def message_library(name, src, deps = [], imports = [], visibility = None):
    """Generates SRC.pb.{h,cc} and compiles them: messages without gRPC, whose headers are slow.

    Args:
      name: the cc_library's name.
      src: the .proto file, in this package.
      deps: message_library targets of the imported files.
      imports: labels of the imported .proto files.
      visibility: as usual.
    """
    base = src[:-len(".proto")]
    native.genrule(
        name = name + "_gen",
        srcs = [src] + imports,
        outs = [base + ".pb.h", base + ".pb.cc"],
        cmd = "protoc -I. --cpp_out=$(GENDIR) $(location %s)" % src,
        tags = ["generated_header"],
    )
    native.cc_library(
        name = name,
        srcs = [base + ".pb.cc"],
        hdrs = [base + ".pb.h"],
        copts = ["-Wno-unused-parameter", "-O1"],
        deps = deps + ["@system//:protobuf"],
        visibility = visibility,
    )

def stub_library(name, src, messages, imports = [], visibility = None):
    """Generates SRC.grpc.pb.{h,cc} and compiles them: the gRPC stubs, together with their messages.

    Args:
      name: the cc_library's name.
      src: the .proto file, in this package.
      messages: the message_library of `src`.
      imports: labels of the imported .proto files.
      visibility: as usual.
    """
    base = src[:-len(".proto")]
    native.genrule(
        name = name + "_gen",
        srcs = [src] + imports,
        outs = [base + ".grpc.pb.h", base + ".grpc.pb.cc"],
        cmd = "protoc -I. --grpc_out=$(GENDIR) " +
              "--plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin $(location %s)" % src,
        tags = ["generated_header"],
    )
    native.cc_library(
        name = name,
        srcs = [base + ".grpc.pb.cc"],
        hdrs = [base + ".grpc.pb.h"],
        copts = ["-Wno-unused-parameter", "-O1"],
        deps = [messages, "@system//:grpc", "@system//:absl"],
        visibility = visibility,
    )
