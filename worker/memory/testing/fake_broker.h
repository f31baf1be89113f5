// A broker for tests of the memory client: real sockets, real descriptors, real streams, and a
// script in place of policy. It can die and come back at any moment, and lie.
//
// Threads: the test's thread calls; every wait has a deadline, after which the test fails.
#ifndef PALIMPSEST_WORKER_MEMORY_TESTING_FAKE_BROKER_H_
#define PALIMPSEST_WORKER_MEMORY_TESTING_FAKE_BROKER_H_

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/descriptor_channel.h"
#include "common/fd.h"
#include "common/mutex.h"
#include "common/random.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"

namespace palimpsest {

class FakeBroker : private v1::Broker::Service {
 public:
  static constexpr Bytes kSlab = MiB(2);
  static constexpr uint32_t kPoolSlabs = 16;
  // Stages of 1, 2 and 1 slabs.
  static constexpr uint32_t kImageSlabs = 4;

  struct Model {
    Bytes slab;
    uint32_t pool_slabs = 0;
    // Slabs of each stage.
    std::vector<uint32_t> stages;
    std::string image;
  };

  // What the next connections are told; set while the broker is down.
  struct Lies {
    bool refuse_hello = false;
    bool refuse_attach = false;
    bool forget_tokens = false;
    bool writable_image = false;
    bool short_image = false;
    bool small_slabs = false;
    bool unsealed_slabs = false;
    bool stage_gap = false;
    std::optional<uint32_t> wrong_checksum;  // of this slab
  };

  // Sockets lie in `folder`. Down at first. Without a model: one of random bytes, as the constants
  // say.
  explicit FakeBroker(std::string folder);
  FakeBroker(std::string folder, Model model);
  ~FakeBroker() override;

  std::string address() const { return "unix:" + folder_ + "/broker.sock"; }
  std::string descriptor_socket() const { return folder_ + "/descriptors.sock"; }
  Lies& lies() { return lies_; }
  // Of Attached; none at first. The test grants them.
  void set_workspace_slabs(uint32_t slabs) { workspace_slabs_ = slabs; }

  // As under temporal sharing.
  void set_turns(bool turns) { turns_ = turns; }

  void Start();
  // Connections break at once, as when the process is killed.
  void Kill();

  // Waits until a worker has attached `times` times since the broker was made.
  void AwaitAttached(int times);
  v1::Attach last_attach() const;
  // Slabs whose descriptors were returned since the broker started, and whether the image was.
  std::set<uint32_t> returned_slabs() const;
  bool image_returned() const;

  // The next message of any of the given cases; others are dropped.
  v1::WorkerMessage Await(const std::vector<v1::WorkerMessage::MessageCase>& wanted);
  v1::WorkerMessage Await(v1::WorkerMessage::MessageCase wanted) {
    return Await(std::vector<v1::WorkerMessage::MessageCase>{wanted});
  }

  // The next message, if one has come.
  std::optional<v1::WorkerMessage> Next();

  void Send(const v1::BrokerMessage& message);
  // Grants these slabs of the pool (with fresh memory); the grant's id. `token` false: the token is
  // one that the descriptor socket does not know.
  uint64_t Grant(v1::SlabRole role, const std::vector<uint32_t>& slabs,
                 const std::vector<uint32_t>& indexes = {}, bool valid_token = true);
  void LimitLink(double bytes_per_second);
  uint64_t RevokeParameters(const std::vector<uint32_t>& indexes);
  uint64_t RevokeKv(uint32_t slabs);
  // Gives the message an id, which is returned, and a deadline.
  uint64_t SetRotation(v1::SetRotation rotation);

  // Overwrites the memory that the slab was granted with last.
  void Fill(uint32_t slab, unsigned char byte);
  void TakeTurn(uint64_t turn);
  void EndTurn(uint64_t turn);

  // The bytes of the image's slab.
  std::string ImageSlab(uint32_t slab) const;
  v1::ImageManifest Manifest() const;

 private:
  using Stream = grpc::ServerReaderWriter<v1::BrokerMessage, v1::WorkerMessage>;

  struct Offer {
    DescriptorKind kind = DescriptorKind::kSlabs;
    std::vector<SlabEntry> entries;
    std::vector<std::shared_ptr<UniqueFd>> descriptors;
  };

  grpc::Status Session(grpc::ServerContext* context, Stream* stream) override;
  void AcceptLoop();
  void Serve(DescriptorChannel& channel);
  bool Answer(DescriptorChannel& channel, ReceivedPacket request);
  std::shared_ptr<UniqueFd> NewSlab() const;
  Token MakeOffer(Offer offer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  v1::Attached MakeAttached() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for `condition` on changed_; fails the test at the deadline.
  template <typename Condition>
  void AwaitLocked(const Condition& condition, const char* what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string folder_;
  const Model model_;
  Lies lies_;
  uint32_t workspace_slabs_ = 0;
  bool turns_ = false;

  std::unique_ptr<grpc::Server> server_;
  std::optional<DescriptorListener> listener_;
  std::thread acceptor_;

  mutable Mutex mu_;
  CondVar changed_;
  bool down_ ABSL_GUARDED_BY(mu_) = true;
  std::list<DescriptorChannel> channels_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> servers_ ABSL_GUARDED_BY(mu_);
  std::vector<Token> nonces_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<Token, Offer> offers_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<UniqueFd> image_file_ ABSL_GUARDED_BY(mu_);
  std::map<uint32_t, std::shared_ptr<UniqueFd>> slabs_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;

  Stream* stream_ ABSL_GUARDED_BY(mu_) = nullptr;
  int attached_ ABSL_GUARDED_BY(mu_) = 0;
  v1::Attach last_attach_ ABSL_GUARDED_BY(mu_);
  std::set<uint32_t> returned_slabs_ ABSL_GUARDED_BY(mu_);
  bool image_returned_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<v1::WorkerMessage> messages_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_TESTING_FAKE_BROKER_H_
