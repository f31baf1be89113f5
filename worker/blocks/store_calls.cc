#include "worker/blocks/store_calls.h"

#include <algorithm>
#include <iterator>

#include "common/grpc_keepalive.h"
#include "worker/core/check.h"

namespace palimpsest {

StoreCalls::~StoreCalls() {
  MutexLock lock(&mu_);
  PALIMPSEST_CHECK(stopping_ && open_ == 0);
}

StoreCalls::SessionPtr StoreCalls::Open(const std::string& address, const ArenaSession& session) {
  auto opened = std::make_shared<Session>();
  opened->epoch = session.epoch;
  opened->proof.set_session_id(session.session.value());
  opened->proof.set_block_token(session.block_token);
  grpc::ChannelArguments arguments;
  // Whose state is not that of an earlier broker's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  Keepalive(arguments);
  opened->stub = v1::BlockStore::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  std::vector<SessionPtr> unused;
  MutexLock lock(&mu_);
  const auto idle = std::stable_partition(sessions_.begin(), sessions_.end(),
                                          [](const SessionPtr& s) { return s.use_count() > 1; });
  std::move(idle, sessions_.end(), std::back_inserter(unused));
  sessions_.erase(idle, sessions_.end());
  sessions_.push_back(opened);
  return opened;
}

void StoreCalls::Begin(grpc::ClientContext* context) {
  MutexLock lock(&mu_);
  cancellable_.insert(context);
  ++open_;
  if (stopping_) context->TryCancel();
}

void StoreCalls::Finish(grpc::ClientContext* context) {
  MutexLock lock(&mu_);
  cancellable_.erase(context);
}

void StoreCalls::Leave() {
  MutexLock lock(&mu_);
  --open_;
  changed_.SignalAll();
}

void StoreCalls::Cancel() {
  MutexLock lock(&mu_);
  for (grpc::ClientContext* context : cancellable_) context->TryCancel();
}

void StoreCalls::Shutdown() {
  MutexLock lock(&mu_);
  stopping_ = true;
  for (grpc::ClientContext* context : cancellable_) context->TryCancel();
  while (open_ > 0) changed_.Wait(&mu_);
}

}  // namespace palimpsest
