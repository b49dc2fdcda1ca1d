/* The transport of context parallelism over MPI, for tensors in host memory.
 *
 * The functions are compiled into the caller's program, so that the library does not depend on MPI. Compile the program
 * with mpicc or mpicxx, or link MPI to it. Tested with Open MPI.
 *
 *   tandem_cp_mpi mpi;
 *   tandem_cp_transport transport;
 *   tandem_cp_mpi_open(MPI_COMM_WORLD, &mpi, &transport);
 *   ... tandem_cp_forward and tandem_cp_backward with args.transport = &transport, then
 *   tandem_cp_mpi_close(&mpi);
 */
#ifndef TANDEM_CONTEXT_PARALLEL_MPI_H_
#define TANDEM_CONTEXT_PARALLEL_MPI_H_

#include <mpi.h>
#include <stdlib.h>

#include "tandem/context_parallel.h"

/* The communicator of a transport: a duplicate, so that messages of the caller's communicator do not interfere. */
typedef struct tandem_cp_mpi {
  MPI_Comm comm;
} tandem_cp_mpi;

/* The requests of one exchange. */
typedef struct tandem_cp_mpi_requests {
  int count;
  MPI_Request* list;
} tandem_cp_mpi_requests;

/* The count of an MPI message is an int. */
#define TANDEM_CP_MPI_PART ((int64_t)1 << 30)

static inline int64_t tandem_cp_mpi_parts(const tandem_cp_message* messages, int64_t count) {
  int64_t parts = 0;
  for (int64_t n = 0; n < count; ++n) parts += (messages[n].bytes + TANDEM_CP_MPI_PART - 1) / TANDEM_CP_MPI_PART;
  return parts;
}

/* Starts the parts of some messages. Returns MPI's error code. */
static inline int tandem_cp_mpi_start(MPI_Comm comm, const tandem_cp_message* messages, int64_t count, int sends,
                                      tandem_cp_mpi_requests* requests) {
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t first = 0; first < messages[n].bytes; first += TANDEM_CP_MPI_PART) {
      const int64_t rest = messages[n].bytes - first;
      const int bytes = (int)(rest < TANDEM_CP_MPI_PART ? rest : TANDEM_CP_MPI_PART);
      char* data = (char*)messages[n].data + first;
      MPI_Request* request = &requests->list[requests->count];
      const int error = sends ? MPI_Isend(data, bytes, MPI_BYTE, messages[n].peer, 0, comm, request)
                              : MPI_Irecv(data, bytes, MPI_BYTE, messages[n].peer, 0, comm, request);
      if (error != MPI_SUCCESS) return error;
      ++requests->count;
    }
  }
  return MPI_SUCCESS;
}

static inline int32_t tandem_cp_mpi_wait(void* user_data, void* request) {
  tandem_cp_mpi_requests* requests = (tandem_cp_mpi_requests*)request;
  (void)user_data;
  const int error = MPI_Waitall(requests->count, requests->list, MPI_STATUSES_IGNORE);
  free(requests->list);
  free(requests);
  return error;
}

static inline int32_t tandem_cp_mpi_exchange(void* user_data, const tandem_cp_message* sends, int64_t send_count,
                                             const tandem_cp_message* receives, int64_t receive_count, void** request) {
  const MPI_Comm comm = ((tandem_cp_mpi*)user_data)->comm;
  const int64_t parts = tandem_cp_mpi_parts(sends, send_count) + tandem_cp_mpi_parts(receives, receive_count);
  tandem_cp_mpi_requests* requests = (tandem_cp_mpi_requests*)malloc(sizeof(tandem_cp_mpi_requests));
  MPI_Request* list = (MPI_Request*)malloc((size_t)parts * sizeof(MPI_Request) + 1);
  if (requests == NULL || list == NULL) {
    free(requests);
    free(list);
    return MPI_ERR_NO_MEM;
  }
  requests->count = 0;
  requests->list = list;
  int error = tandem_cp_mpi_start(comm, receives, receive_count, 0, requests);
  if (error == MPI_SUCCESS) error = tandem_cp_mpi_start(comm, sends, send_count, 1, requests);
  /* After an error some messages are in flight. The memory stays allocated, because MPI may still use it. */
  *request = requests;
  return error;
}

static inline int32_t tandem_cp_mpi_all_gather(void* user_data, const void* send, void* receive, int64_t bytes) {
  const MPI_Comm comm = ((tandem_cp_mpi*)user_data)->comm;
  if (bytes > TANDEM_CP_MPI_PART) return MPI_ERR_COUNT;
  return MPI_Allgather(send, (int)bytes, MPI_BYTE, receive, (int)bytes, MPI_BYTE, comm);
}

/* Fills in the transport of this process. All processes of comm call this together, after MPI_Init. The struct *mpi
 * must stay valid until tandem_cp_mpi_close. Returns 0 or MPI's error code. */
static inline int32_t tandem_cp_mpi_open(MPI_Comm comm, tandem_cp_mpi* mpi, tandem_cp_transport* transport) {
  int rank = 0, ranks = 0;
  int error = MPI_Comm_dup(comm, &mpi->comm);
  if (error != MPI_SUCCESS) return error;
  /* The library reports errors. Without this handler MPI ends the process. */
  error = MPI_Comm_set_errhandler(mpi->comm, MPI_ERRORS_RETURN);
  if (error == MPI_SUCCESS) error = MPI_Comm_rank(mpi->comm, &rank);
  if (error == MPI_SUCCESS) error = MPI_Comm_size(mpi->comm, &ranks);
  transport->size = sizeof(tandem_cp_transport);
  transport->rank = rank;
  transport->ranks = ranks;
  transport->user_data = mpi;
  transport->exchange = tandem_cp_mpi_exchange;
  transport->wait = tandem_cp_mpi_wait;
  transport->all_gather = tandem_cp_mpi_all_gather;
  transport->last_error = NULL;
  transport->stream = NULL;
  return error;
}

/* Frees the communicator. All processes call this together, before MPI_Finalize. */
static inline int32_t tandem_cp_mpi_close(tandem_cp_mpi* mpi) { return MPI_Comm_free(&mpi->comm); }

#endif /* TANDEM_CONTEXT_PARALLEL_MPI_H_ */
