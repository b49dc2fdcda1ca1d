/* XLA's foreign function interface: the structs of its C API (xla/ffi/api/c_api.h) that the handlers use, with their
 * layout. C and C++, so that a test can compare the layout with jaxlib's header. Offsets have been the same since
 * version 0.1 of the interface. */
#ifndef TANDEM_XLA_FFI_H_
#define TANDEM_XLA_FFI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version that this file describes. */
enum { kXlaMajor = 0, kXlaMinor = 3 };

enum { kXlaMetadata = 1 }; /* the type of an extension */

typedef struct XlaExtension {
  size_t struct_size;
  int32_t type;
  struct XlaExtension* next;
} XlaExtension;

typedef struct XlaVersion {
  size_t struct_size;
  XlaExtension* extensions;
  int major;
  int minor;
} XlaVersion;

typedef struct XlaMetadata {
  size_t struct_size;
  XlaVersion version;
  uint32_t traits;
} XlaMetadata;

typedef struct XlaMetadataExtension {
  XlaExtension base;
  XlaMetadata* metadata;
} XlaMetadataExtension;

/* absl's codes of errors */
typedef enum XlaErrorCode {
  kXlaInvalidArgument = 3,
  kXlaResourceExhausted = 8,
  kXlaFailedPrecondition = 9,
  kXlaUnimplemented = 12,
  kXlaInternal = 13
} XlaErrorCode;

typedef enum XlaType {
  kXlaPred = 1,
  kXlaS8 = 2,
  kXlaS16 = 3,
  kXlaS32 = 4,
  kXlaS64 = 5,
  kXlaU8 = 6,
  kXlaU16 = 7,
  kXlaU32 = 8,
  kXlaU64 = 9,
  kXlaF16 = 10,
  kXlaF32 = 11,
  kXlaF64 = 12,
  kXlaBF16 = 16
} XlaType;

typedef struct XlaBuffer {
  size_t struct_size;
  XlaExtension* extensions;
  int32_t type; /* XlaType */
  void* data;
  int64_t rank;
  int64_t* dims;
} XlaBuffer;

typedef struct XlaText {
  const char* data; /* not terminated */
  size_t size;
} XlaText;

typedef struct XlaScalar {
  int32_t type; /* XlaType */
  void* value;
} XlaScalar;

/* Arguments and results of a call: all are buffers. */
typedef struct XlaBuffers {
  size_t struct_size;
  XlaExtension* extensions;
  int64_t size;
  int32_t* kinds;
  void** buffers; /* XlaBuffer */
} XlaBuffers;

enum { kXlaScalarAttribute = 3, kXlaTextAttribute = 4 };

typedef struct XlaAttributes {
  size_t struct_size;
  XlaExtension* extensions;
  int64_t size;
  int32_t* kinds;
  XlaText** names;
  void** values; /* XlaScalar, XlaText */
} XlaAttributes;

typedef struct XlaError XlaError;
typedef struct XlaContext XlaContext;
struct XlaApi;

typedef struct XlaFrame {
  size_t struct_size;
  XlaExtension* extensions;
  const struct XlaApi* api;
  XlaContext* context;
  int32_t stage;
  XlaBuffers inputs;
  XlaBuffers outputs;
  XlaAttributes attributes;
} XlaFrame;

typedef struct XlaNewError {
  size_t struct_size;
  XlaExtension* extensions;
  const char* message;
  int32_t code; /* XlaErrorCode */
} XlaNewError;

typedef struct XlaErrorMessage {
  size_t struct_size;
  XlaExtension* extensions;
  XlaError* error;
  const char* message;
} XlaErrorMessage;

typedef struct XlaOldError {
  size_t struct_size;
  XlaExtension* extensions;
  XlaError* error;
} XlaOldError;

typedef struct XlaStream {
  size_t struct_size;
  XlaExtension* extensions;
  XlaContext* context;
  void* stream;
} XlaStream;

typedef struct XlaAllocation {
  size_t struct_size;
  XlaExtension* extensions;
  XlaContext* context;
  size_t bytes;
  size_t alignment;
  void* data;
} XlaAllocation;

typedef struct XlaRelease {
  size_t struct_size;
  XlaExtension* extensions;
  XlaContext* context;
  size_t bytes;
  void* data;
} XlaRelease;

typedef struct XlaOrdinal {
  size_t struct_size;
  XlaExtension* extensions;
  XlaContext* context;
  int32_t ordinal;
} XlaOrdinal;

/* Members without a use here have the type of any function. */
typedef void XlaUnused(void);

typedef struct XlaApi {
  size_t struct_size;
  XlaExtension* extensions;
  XlaVersion version;
  const void* internal;
  XlaError* (*new_error)(XlaNewError*);
  void (*error_message)(XlaErrorMessage*);
  void (*delete_error)(XlaOldError*);
  XlaUnused* register_handler;
  XlaError* (*stream)(XlaStream*);
  XlaUnused* register_type;
  XlaUnused* context_value;
  XlaUnused* set_state;
  XlaUnused* state;
  XlaError* (*allocate)(XlaAllocation*);
  XlaError* (*release)(XlaRelease*);
  XlaUnused* schedule;
  XlaUnused* threads;
  XlaUnused* new_future;
  XlaUnused* finish_future;
  XlaUnused* fail_future;
  XlaUnused* run_id;
  XlaError* (*ordinal)(XlaOrdinal*);
} XlaApi;

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_XLA_FFI_H_ */
