// A worker without a model, for tests of the broker: it identifies itself, attaches, maps what it
// is granted and answers revokes, well or badly, as it is told.
//
// Threads: the methods are called from one thread; a second one reads the session's messages and
// reacts to them.
#ifndef PALIMPSEST_BROKER_SERVER_TESTING_SCRIPTED_WORKER_H_
#define PALIMPSEST_BROKER_SERVER_TESTING_SCRIPTED_WORKER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/server/testing/worker_link.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "grpcpp/grpcpp.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"

namespace palimpsest {

class ScriptedWorker {
 public:
  // What it does with a Revoke: answers after unmapping, never answers, answers without unmapping.
  enum class Manners { kHonest, kSilent, kLiar };
  // Where it stands still in the protocol: before it does what a message says, or between having
  // done it and saying so; kRevokedPart: after it said so of the first slab.
  enum class Hold {
    kNowhere,
    kRevoke,
    kRevokedPart,
    kRevoked,
    kGrant,
    kMapped,
    kRotation,
    kRotated
  };

  ScriptedWorker() = default;
  ~ScriptedWorker() { Drop(); }

  absl::Status Hello(const std::string& socket, const std::string& tenant,
                     const std::string& secret) {
    return link_.Hello(socket, tenant, secret);
  }
  // Attaches with the nonce of Hello, or with another one.
  absl::Status Attach(const std::string& socket,
                      const std::optional<std::string>& nonce = std::nullopt);
  // Returns all descriptors over the new descriptor connection and brings the session back.
  absl::Status Reattach(const std::string& socket);
  // Brings the session back and claims what it holds, but returns no descriptor.
  absl::Status Claim(const std::string& socket);
  // Returns one slab, with the memory of slab `memory_of` or with other memory that looks like it.
  absl::Status ReturnSlab(uint32_t slab, uint64_t epoch, std::optional<uint32_t> memory_of);
  // Returns the image, or memory that is not it.
  absl::Status ReturnImage(bool forged);
  // Closes the stream and the descriptor connection; what is mapped stays.
  void Drop();

  absl::Status Send(const v1::WorkerMessage& message) { return link_.Send(message); }
  absl::Status Activate();
  absl::Status SetKvTarget(uint32_t target, uint32_t needed);
  // `unused`: its KV slabs hold nothing.
  absl::Status Report(bool active, bool unused);
  // Asks for more, then less KV, `messages` times, as fast as the stream takes it.
  absl::Status Flood(uint32_t messages);
  // Opens `count` sessions in which it says nothing; they last as long as the worker.
  void OpenSilentCalls(const std::string& socket, uint32_t count);

  void set_manners(Manners manners);
  // Standing still concerns messages that come from now on; others are dealt with.
  void HoldAt(Hold hold);
  // Goes on with everything at which it stood still.
  absl::Status GoOn();
  size_t held();
  // Whether grants are fetched and mapped as they come.
  void set_maps(bool maps);
  // Whether it says, when it attaches, that it carries out SetRotation.
  void set_rotates(bool rotates) { rotates_ = rotates; }
  // Whether the messages of the sessions to come are read.
  void set_reads(bool reads) { reads_ = reads; }
  // Whether the descriptor connection is closed as soon as the broker says that it packs the image.
  void set_hangs_up(bool hangs_up) { hangs_up_ = hangs_up; }

  // Fetches with the token of the last Grant, whether or not it was used already.
  absl::Status FetchAgain();
  absl::Status Fetch(const std::string& token);
  std::string last_token();

  // Wait until it is so, at most `timeout`; DeadlineExceeded tells what it is instead.
  absl::Status AwaitSlabs(v1::SlabRole role, size_t count, absl::Duration timeout);
  absl::Status AwaitGrants(size_t count, absl::Duration timeout);
  absl::Status AwaitRevokes(size_t count, absl::Duration timeout);
  // Until so many layers are freed.
  absl::Status AwaitFreed(int layers, absl::Duration timeout);
  absl::Status AwaitRefused(absl::Duration timeout);
  absl::Status AwaitPressure(size_t count, absl::Duration timeout);
  // Until the stream has ended; its status.
  absl::StatusOr<absl::Status> AwaitLost(absl::Duration timeout);

  uint64_t session();
  std::vector<uint32_t> Slabs(v1::SlabRole role);
  // 0 for a slab that is not held.
  uint64_t EpochOf(uint32_t slab);
  // The first byte of a slab that is or was mapped; a retired one ends the process with SIGBUS.
  absl::StatusOr<int> Read(uint32_t slab);
  absl::Status Write(uint32_t slab, int value);
  // Writes every byte of everything that is mapped.
  void Fill(int value);
  // The same, and of what will be mapped, once all its bytes were found to be 0.
  void Mark(int value);
  // Whether that was so of every slab, and every byte that is mapped is still the mark.
  absl::Status CheckMarks();

 private:
  struct Held {
    uint64_t epoch = 0;
    v1::SlabRole role = v1::SLAB_ROLE_UNSPECIFIED;
    uint32_t region_index = 0;
    UniqueFd memory;
    Mapping mapping;
  };
  using Stream = grpc::ClientReaderWriter<v1::WorkerMessage, v1::BrokerMessage>;

  struct SilentCall {
    grpc::ClientContext context;
    std::unique_ptr<Stream> stream;
  };

  // The Attach that brings the session back.
  v1::Attach Returning();
  absl::Status OpenSession(const std::string& socket, const v1::Attach& attach);
  void ReadLoop();
  // Reacts, unless it stands still at such messages.
  void Receive(const v1::BrokerMessage& message);
  void React(const v1::BrokerMessage& message);
  bool HoldsAt(Hold at);
  // Sends an answer, unless it stands still there.
  absl::Status Answer(Hold at, const v1::WorkerMessage& answer);
  absl::Status Map(const v1::Grant& grant);
  void AnswerRevoke(const v1::Revoke& revoke);
  void Rotate(const v1::SetRotation& change);
  absl::Status Await(absl::string_view what, absl::Duration timeout,
                     const std::function<bool()>& holds);
  size_t Count(v1::SlabRole role) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  WorkerLink link_;
  std::thread reader_;
  bool rotates_ = false;
  bool reads_ = true;
  bool hangs_up_ = false;
  std::vector<std::unique_ptr<SilentCall>> silent_calls_;

  Mutex mu_;
  CondVar changed_;
  Manners manners_ ABSL_GUARDED_BY(mu_) = Manners::kHonest;
  bool maps_ ABSL_GUARDED_BY(mu_) = true;
  Hold hold_ ABSL_GUARDED_BY(mu_) = Hold::kNowhere;
  std::vector<v1::BrokerMessage> held_messages_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::WorkerMessage> held_answers_ ABSL_GUARDED_BY(mu_);
  std::optional<int> mark_ ABSL_GUARDED_BY(mu_);
  std::optional<uint32_t> came_dirty_ ABSL_GUARDED_BY(mu_);
  uint64_t slab_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t session_ ABSL_GUARDED_BY(mu_) = 0;
  std::string fingerprint_ ABSL_GUARDED_BY(mu_);
  UniqueFd image_ ABSL_GUARDED_BY(mu_);
  std::map<uint32_t, Held> slabs_ ABSL_GUARDED_BY(mu_);
  // Mappings that a liar kept.
  std::map<uint32_t, Held> kept_ ABSL_GUARDED_BY(mu_);
  v1::Rotation rotation_ ABSL_GUARDED_BY(mu_);
  std::string last_token_ ABSL_GUARDED_BY(mu_);
  size_t grants_ ABSL_GUARDED_BY(mu_) = 0;
  size_t revokes_ ABSL_GUARDED_BY(mu_) = 0;
  size_t refused_ ABSL_GUARDED_BY(mu_) = 0;
  size_t pressure_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<absl::Status> lost_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_TESTING_SCRIPTED_WORKER_H_
