// A worker process for the checks of sessions on a GPU: a memory client over GPU memory and no
// engine. One command a line on descriptor 3, one answer a line on descriptor 4 ("ok VALUE" or
// "error CODE MESSAGE"), as WorkerProcess speaks.
//   connect ADDRESS SOCKET TENANT SECRET GPUS   attaches, with its workspace, on GPUs "0,1"; what
//                 follows is done and asked on each
//   target N      states the KV target
//   await N       answers when N KV slabs are mapped, with the time (see `release`)
//   grow N STEP   raises the KV target by STEP, waits until as many slabs are mapped, and so on up
//   to
//                 N; answers how long that took, in microseconds
//   fill V        writes V into every word of its KV slabs
//   holds V       whether every word of its KV slabs is V: "yes" or where it is not
//   release       gives all KV slabs back and wants none; answers the time at which it began, in
//                 microseconds since the epoch
//   activate      answers when all parameters are restored
//   parameters    whether they are the image's, by their checksums
//   workspace     whether it can be written and read
//   reattached    answers when the broker was lost and is back
#ifndef PALIMPSEST_TOOLS_GPU_CHECK_GPU_WORKER_H_
#define PALIMPSEST_TOOLS_GPU_CHECK_GPU_WORKER_H_

namespace palimpsest {

// Never returns before descriptor 3 ends; then the process is to end at once.
void RunGpuWorker();

}  // namespace palimpsest

#endif  // PALIMPSEST_TOOLS_GPU_CHECK_GPU_WORKER_H_
