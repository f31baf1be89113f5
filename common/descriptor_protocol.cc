#include "common/descriptor_protocol.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr size_t kFingerprintBytes = 32;

// The first byte of every packet is the index of its type in DescriptorPacket, plus one.
template <typename T, size_t I = 0>
constexpr uint8_t TypeByte() {
  if constexpr (std::is_same_v<T, std::variant_alternative_t<I, DescriptorPacket>>) {
    return I + 1;
  } else {
    return TypeByte<T, I + 1>();
  }
}

class Writer {
 public:
  template <typename U>
  void Integer(U value) {
    for (size_t i = 0; i < sizeof(U); ++i) {
      out_.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
    }
  }
  void Raw(absl::string_view bytes) { out_.append(bytes.data(), bytes.size()); }
  void String(absl::string_view bytes) {
    Integer(static_cast<uint16_t>(bytes.size()));
    Raw(bytes);
  }
  void Entries(const std::vector<SlabEntry>& entries) {
    Integer(static_cast<uint16_t>(entries.size()));
    for (const SlabEntry& entry : entries) {
      Integer(entry.slab_id.value());
      Integer(entry.epoch.value());
    }
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads past the end give zeros and make Complete() false.
class Reader {
 public:
  explicit Reader(absl::string_view in) : in_(in) {}

  template <typename U>
  U Integer() {
    const absl::string_view bytes = Raw(sizeof(U));
    U value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value |= static_cast<U>(static_cast<uint8_t>(bytes[i])) << (8 * i);
    }
    return value;
  }
  absl::string_view Raw(size_t size) {
    if (size > in_.size()) {
      short_ = true;
      in_ = {};
      return {};
    }
    const absl::string_view bytes = in_.substr(0, size);
    in_.remove_prefix(size);
    return bytes;
  }
  std::string String() { return std::string(Raw(Integer<uint16_t>())); }
  Token ReadToken() { return Token::FromBytes(Raw(kTokenBytes)).value_or(Token()); }
  std::vector<SlabEntry> Entries() {
    const size_t count = Integer<uint16_t>();
    std::vector<SlabEntry> entries;
    for (size_t i = 0; i < count && !short_; ++i) {
      const SlabId slab_id(Integer<uint32_t>());
      entries.push_back({slab_id, Epoch(Integer<uint64_t>())});
    }
    return entries;
  }

  // Whether everything asked for was there and nothing is left.
  bool Complete() const { return !short_ && in_.empty(); }

 private:
  absl::string_view in_;
  bool short_ = false;
};

void WriteBody(const Hello& p, Writer& out) {
  out.Integer(p.version);
  out.String(p.tenant);
  out.String(p.secret);
}
void WriteBody(const Welcome& p, Writer& out) { out.Raw(p.nonce.bytes()); }
void WriteBody(const Refused& p, Writer& out) {
  out.String(absl::string_view(p.message).substr(0, kMaxMessageBytes));
}
void WriteBody(const Fetch& p, Writer& out) { out.Raw(p.token.bytes()); }
void WriteBody(const Descriptors& p, Writer& out) {
  out.Integer(static_cast<uint8_t>(p.kind));
  out.Integer(p.pieces);
  out.Integer(p.first);
  out.Integer(p.total);
  out.Entries(p.entries);
}
void WriteBody(const ReturnSlabs& p, Writer& out) {
  out.Integer(p.pieces);
  out.Entries(p.entries);
}
void WriteBody(const ReturnImage& p, Writer& out) { out.Raw(p.fingerprint); }
void WriteBody(const Accepted&, Writer&) {}
void WriteBody(const Failed& p, Writer& out) {
  out.String(absl::string_view(p.message).substr(0, kMaxMessageBytes));
}

void ReadBody(Reader& in, Hello& p) {
  p.version = in.Integer<uint32_t>();
  p.tenant = in.String();
  p.secret = in.String();
}
void ReadBody(Reader& in, Welcome& p) { p.nonce = in.ReadToken(); }
void ReadBody(Reader& in, Refused& p) { p.message = in.String(); }
void ReadBody(Reader& in, Fetch& p) { p.token = in.ReadToken(); }
void ReadBody(Reader& in, Descriptors& p) {
  p.kind = static_cast<DescriptorKind>(in.Integer<uint8_t>());
  p.pieces = in.Integer<uint8_t>();
  p.first = in.Integer<uint32_t>();
  p.total = in.Integer<uint32_t>();
  p.entries = in.Entries();
}
void ReadBody(Reader& in, ReturnSlabs& p) {
  p.pieces = in.Integer<uint8_t>();
  p.entries = in.Entries();
}
void ReadBody(Reader& in, ReturnImage& p) {
  p.fingerprint = std::string(in.Raw(kFingerprintBytes));
}
void ReadBody(Reader&, Accepted&) {}
void ReadBody(Reader& in, Failed& p) { p.message = in.String(); }

absl::Status CheckLength(absl::string_view what, size_t size, size_t limit) {
  if (size <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " has ", size, " bytes, at most ", limit, " are allowed"));
}

absl::Status CheckEntries(size_t count, size_t pieces) {
  if (pieces < 1 || pieces > kMaxSlabPieces) {
    return absl::InvalidArgumentError(
        absl::StrCat("slabs of ", pieces, " descriptors, expected 1 to ", kMaxSlabPieces));
  }
  if (count >= 1 && count <= MaxPacketEntries(pieces)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a packet names ", count, " slabs, expected 1 to ",
                                                 MaxPacketEntries(pieces), " of ", pieces,
                                                 " descriptors each"));
}

absl::Status Validate(const Hello& p) {
  if (absl::Status status = CheckLength("the tenant's name", p.tenant.size(), kMaxTenantBytes);
      !status.ok()) {
    return status;
  }
  return CheckLength("the secret", p.secret.size(), kMaxSecretBytes);
}
absl::Status Validate(const Descriptors& p) {
  const bool image = p.kind == DescriptorKind::kImage;
  if (!image && p.kind != DescriptorKind::kSlabs) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown kind of descriptors: ", static_cast<int>(p.kind)));
  }
  if (image) {
    if (p.first == 0 && p.total == 1 && p.pieces == 1 && p.entries.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("an image travels alone, as descriptor 0 of 1");
  }
  if (absl::Status status = CheckEntries(p.entries.size(), p.pieces); !status.ok()) return status;
  if (uint64_t{p.first} + p.entries.size() > p.total) {
    return absl::InvalidArgumentError(absl::StrCat("descriptors ", p.first, " to ",
                                                   uint64_t{p.first} + p.entries.size() - 1,
                                                   " of an answer of ", p.total));
  }
  return absl::OkStatus();
}
absl::Status Validate(const ReturnSlabs& p) { return CheckEntries(p.entries.size(), p.pieces); }
absl::Status Validate(const ReturnImage& p) {
  if (p.fingerprint.size() == kFingerprintBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("an image fingerprint has ", p.fingerprint.size(),
                                                 " bytes, expected ", kFingerprintBytes));
}
absl::Status Validate(const Refused& p) {
  return CheckLength("the message", p.message.size(), kMaxMessageBytes);
}
absl::Status Validate(const Failed& p) {
  return CheckLength("the message", p.message.size(), kMaxMessageBytes);
}
template <typename T>
absl::Status Validate(const T&) {
  return absl::OkStatus();
}

// Validity of what is about to be sent: as Validate, but long messages are cut.
template <typename T>
absl::Status ValidateForSending(const T& p) {
  if constexpr (std::is_same_v<T, Refused> || std::is_same_v<T, Failed>) {
    return absl::OkStatus();
  } else {
    return Validate(p);
  }
}

template <typename T>
absl::StatusOr<DescriptorPacket> DecodeAs(Reader& in) {
  T packet;
  ReadBody(in, packet);
  if (!in.Complete()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ", PacketName(DescriptorPacket(T{})), " packet has the wrong length"));
  }
  if (absl::Status status = Validate(packet); !status.ok()) return status;
  return DescriptorPacket(std::move(packet));
}

template <size_t... I>
absl::StatusOr<DescriptorPacket> DecodeType(uint8_t type, Reader& in, std::index_sequence<I...>) {
  absl::StatusOr<DescriptorPacket> result = absl::InvalidArgumentError(
      absl::StrCat("unknown packet type ", type, ", expected 1 to ", sizeof...(I)));
  ((type == I + 1 ? (void)(result = DecodeAs<std::variant_alternative_t<I, DescriptorPacket>>(in))
                  : void()),
   ...);
  return result;
}

}  // namespace

size_t DescriptorCount(const DescriptorPacket& packet) {
  if (const auto* p = std::get_if<Descriptors>(&packet)) {
    return p->kind == DescriptorKind::kImage ? 1 : p->entries.size() * p->pieces;
  }
  if (const auto* p = std::get_if<ReturnSlabs>(&packet)) return p->entries.size() * p->pieces;
  return std::holds_alternative<ReturnImage>(packet) ? 1 : 0;
}

absl::string_view PacketName(const DescriptorPacket& packet) {
  static constexpr std::array<absl::string_view, std::variant_size_v<DescriptorPacket>> kNames = {
      "Hello",       "Welcome",     "Refused",  "Fetch", "Descriptors",
      "ReturnSlabs", "ReturnImage", "Accepted", "Failed"};
  return kNames[packet.index()];
}

absl::StatusOr<std::string> EncodePacket(const DescriptorPacket& packet) {
  return std::visit(
      [](const auto& p) -> absl::StatusOr<std::string> {
        if (absl::Status status = ValidateForSending(p); !status.ok()) return status;
        Writer out;
        out.Integer(TypeByte<std::decay_t<decltype(p)>>());
        WriteBody(p, out);
        return out.Take();
      },
      packet);
}

absl::StatusOr<DescriptorPacket> DecodePacket(absl::string_view bytes) {
  if (bytes.size() > kMaxPacketBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a packet of ", bytes.size(), " bytes, at most ",
                                                   kMaxPacketBytes, " are allowed"));
  }
  Reader in(bytes);
  const uint8_t type = in.Integer<uint8_t>();
  return DecodeType(type, in, std::make_index_sequence<std::variant_size_v<DescriptorPacket>>());
}

}  // namespace palimpsest
