// OpenCL's handles, for a look at oneDNN's header that names them.
#ifndef KVANT_TESTS_INTEGRATIONS_ONEDNN_CLIENT_CL_CL_H_
#define KVANT_TESTS_INTEGRATIONS_ONEDNN_CLIENT_CL_CL_H_

typedef struct _cl_device_id* cl_device_id;
typedef struct _cl_context* cl_context;
typedef struct _cl_event* cl_event;

#endif  // KVANT_TESTS_INTEGRATIONS_ONEDNN_CLIENT_CL_CL_H_
