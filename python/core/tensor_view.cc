#include "tensor_view.h"

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "call.h"

namespace kvant_python {
namespace {

// What is known of a type of tensors.
struct TensorType {
  const dlpack::ExchangeApi* api = nullptr;
  // What reads the attribute of an object; null if it has none.
  getter requires_grad = nullptr;
  void* closure = nullptr;
  // torch's method that says whether what memory holds is to be negated; null if it has none.
  nb::object is_neg;
};

PyObject* LookUpRequiresGrad(PyObject* object, void*) {
  return PyObject_GetAttrString(object, "requires_grad");
}

const dlpack::ExchangeApi* ExchangeApiOf(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* header = static_cast<const dlpack::ExchangeApiHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header != nullptr && header->version.major != dlpack::kMajorVersion) {
    header = header->prev_api;
  }
  const auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  return api != nullptr && api->dltensor_from_py_object_no_sync != nullptr ? api : nullptr;
}

// A lookup that finds nothing costs as much as an execution, so what is found is kept, for as many
// types as there may be frameworks. They are kept alive: another type may not get their address.
TensorType TypeOf(nb::handle object) {
  constexpr size_t kKept = 16;
  // Never freed: Python may be gone when static objects are.
  static auto* const kept = new std::vector<std::pair<nb::object, TensorType>>;
  const nb::handle type = object.type();
  for (const auto& [known, found] : *kept) {
    if (known.is(type)) return found;
  }
  TensorType found{ExchangeApiOf(type)};
  const nb::object attribute = nb::getattr(type, "requires_grad", nb::none());
  if (Py_TYPE(attribute.ptr()) == &PyGetSetDescr_Type) {  // torch's own, without a lookup
    const auto* own = reinterpret_cast<PyGetSetDescrObject*>(attribute.ptr())->d_getset;
    found.requires_grad = own->get;
    found.closure = own->closure;
  } else if (!attribute.is_none()) {
    found.requires_grad = LookUpRequiresGrad;
  }
  if (nb::hasattr(type, "is_neg")) found.is_neg = nb::getattr(type, "is_neg");
  if (kept->size() < kKept) kept->emplace_back(nb::borrow(type), found);
  return found;
}

std::string TypeName(nb::handle object) { return nb::str(object.type().attr("__name__")).c_str(); }

// Turns the Python exception that is set into kvant.Error.
[[noreturn]] void FailOfException(const Use& use, nb::handle object) {
  nb::python_error error;
  // torch puts a backtrace below what it says.
  const std::string why = nb::str(error.value()).c_str();
  Invalid(use.name + ", a " + TypeName(object) +
          ", cannot be read: " + why.substr(0, why.find('\n')));
}

void CheckGradient(nb::handle object, const TensorType& type, const Use& use) {
  const nb::object required = nb::steal(type.requires_grad(object.ptr(), type.closure));
  if (!required.is_valid()) FailOfException(use, object);
  if (!required.is(Py_True)) return;
  const nb::object torch = nb::module_::import_("torch");
  // Where nothing is recorded, nothing is lost.
  if (!nb::cast<bool>(torch.attr("is_grad_enabled")())) return;
  Invalid(use.name +
          " requires grad, and kvant computes no gradients: detach() it, or run under "
          "torch.no_grad()");
}

void CheckSign(nb::handle object, nb::handle is_neg, const Use& use) {
  const nb::object negated = nb::steal(PyObject_CallOneArg(is_neg.ptr(), object.ptr()));
  if (!negated.is_valid()) FailOfException(use, object);
  if (!negated.is(Py_True)) return;
  Invalid(use.name +
          " has torch's negative bit set, so that its memory holds numbers of the other sign: give "
          "its resolve_neg()");
}

// Of a format of the struct module, one element.
bool TypeOfFormat(const char* format, Py_ssize_t bytes, DLDataType& type) {
  if (format == nullptr) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (*format == '\0' || format[1] != '\0') return false;
  if (*format == '?') {
    type.code = dlpack::kBool;
  } else if (std::strchr("efd", *format) != nullptr) {
    type.code = kDLFloat;
  } else if (std::strchr("bhilqn", *format) != nullptr) {
    type.code = kDLInt;
  } else if (std::strchr("BHILQN", *format) != nullptr) {
    type.code = kDLUInt;
  } else {
    return false;
  }
  type.bits = static_cast<uint8_t>(bytes * 8);
  type.lanes = 1;
  return true;
}

}  // namespace

struct TensorView::Buffer {
  Py_buffer view;
  std::vector<int64_t> dims, strides;
};

void TensorView::FreeBuffer::operator()(Buffer* buffer) const {
  PyBuffer_Release(&buffer->view);
  delete buffer;
}

void TensorView::Read(nb::handle object, const Use& use) {
  object_ = nb::borrow(object);
  const TensorType type = TypeOf(object);
  if (type.requires_grad != nullptr) CheckGradient(object, type, use);
  if (type.is_neg.is_valid()) CheckSign(object, type.is_neg, use);
  if (type.api != nullptr) {
    if (type.api->dltensor_from_py_object_no_sync(object.ptr(), &tensor_) != 0) {
      FailOfException(use, object);
    }
    api_ = type.api;
    return;
  }
  if (use.number != KVANT_UNDEF && (PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr()))) {
    return ReadNumber(use);
  }
  if (PyObject_CheckBuffer(object.ptr()) && (ReadBuffer(use) || ReadBytes(use))) return;
  if (nb::hasattr(object, "__dlpack__")) return ReadCapsule(use);
  Invalid(use.name + " is a " + TypeName(object) +
          ", not a tensor: it has neither the buffer protocol nor DLPack");
}

void TensorView::ReadNumber(const Use& use) {
  const auto refuse = [&] {
    Invalid(use.name + " is " + nb::repr(object_).c_str() + ", but must be a number of type " +
            kvant_type_name(use.number));
  };
  if (use.number == KVANT_F32) {
    const double value = PyFloat_AsDouble(object_.ptr());
    if (PyErr_Occurred() != nullptr) PyErr_Clear(), refuse();
    number_.f32 = static_cast<float>(value);
    if (std::isinf(number_.f32) && !std::isinf(value)) refuse();
  } else {
    if (!PyLong_Check(object_.ptr())) refuse();
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object_.ptr(), &overflow);
    if (overflow != 0) refuse();
    if (use.number == KVANT_S32) {
      number_.s32 = static_cast<int32_t>(value);
      if (number_.s32 != value) refuse();
    } else {
      number_.s64 = value;
    }
  }
  tensor_ = {};
  tensor_.data = &number_;
  tensor_.device = {kDLCPU, 0};
  tensor_.dtype = {static_cast<uint8_t>(use.number == KVANT_F32 ? kDLFloat : kDLInt),
                   static_cast<uint8_t>(kvant_type_bits(use.number)), 1};
}

// False if it has no buffer of this kind, but may have something else.
bool TensorView::ReadBuffer(const Use& use) {
  auto buffer = std::make_unique<Buffer>();
  constexpr int kFlags = PyBUF_STRIDES | PyBUF_FORMAT;
  if (PyObject_GetBuffer(object_.ptr(), &buffer->view,
                         kFlags | (use.written ? PyBUF_WRITABLE : 0)) != 0) {
    PyErr_Clear();
    if (use.written && PyObject_GetBuffer(object_.ptr(), &buffer->view, kFlags) == 0) {
      PyBuffer_Release(&buffer->view);
      Invalid(use.name + " is read-only");
    }
    PyErr_Clear();
    return false;
  }
  buffer_.reset(buffer.release());
  const Py_buffer& view = buffer_->view;
  tensor_ = {};
  if (!TypeOfFormat(view.format, view.itemsize, tensor_.dtype)) {
    Invalid(use.name + " has elements of format '" + view.format +
            "', which is none of kvant's types in this machine's byte order");
  }
  buffer_->dims.assign(view.shape, view.shape + view.ndim);
  // Some have none although they are asked for: ctypes' arrays, which are dense.
  for (int d = 0; d < view.ndim && view.strides != nullptr; ++d) {
    if (view.strides[d] % view.itemsize != 0 && view.shape[d] > 1) {
      Invalid(use.name + " has a stride of " + std::to_string(view.strides[d]) +
              " bytes, which is no multiple of an element's " + std::to_string(view.itemsize));
    }
    buffer_->strides.push_back(view.strides[d] / view.itemsize);
  }
  tensor_.data = view.buf;
  tensor_.device = {kDLCPU, 0};
  tensor_.ndim = view.ndim;
  tensor_.shape = buffer_->dims.data();
  if (view.strides != nullptr) tensor_.strides = buffer_->strides.data();
  return true;
}

// Of a numpy array of a type that is not numpy's own but ml_dtypes', which has no buffer. A view of
// its bytes has. False for anything else.
bool TensorView::ReadBytes(const Use& use) {
  struct Type {
    const char *name, *bytes;
    uint8_t code;
  };
  constexpr Type kTypes[] = {{"bfloat16", "uint16", kDLBfloat},
                             {"float8_e4m3fn", "uint8", dlpack::kF8E4M3},
                             {"float8_e5m2", "uint8", dlpack::kF8E5M2}};
  const std::string module = nb::str(object_.type().attr("__module__")).c_str();
  if (module != "numpy" || !nb::hasattr(object_, "dtype")) return false;
  const std::string name = nb::str(object_.attr("dtype").attr("name")).c_str();
  for (const Type& type : kTypes) {
    if (name != type.name) continue;
    object_ = object_.attr("view")(type.bytes);
    if (!ReadBuffer(use)) return false;
    tensor_.dtype.code = type.code;
    return true;
  }
  return false;
}

// A capsule that is not renamed frees its tensor with itself.
void TensorView::ReadCapsule(const Use& use) {
  try {
    nb::dict arguments;
    const nb::tuple device(object_.attr("__dlpack_device__")());
    // The default stream, on which the work is ordered then.
    if (nb::cast<int>(device[0]) == kDLCUDA) arguments["stream"] = 1;
    try {
      arguments["max_version"] = nb::make_tuple(dlpack::kMajorVersion, 1);
      capsule_ = object_.attr("__dlpack__")(**arguments);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;  // else of before version 1
      nb::del(arguments["max_version"]);
      capsule_ = object_.attr("__dlpack__")(**arguments);
    }
  } catch (nb::python_error& error) {
    error.restore();
    FailOfException(use, object_);
  }
  if (PyCapsule_IsValid(capsule_.ptr(), "dltensor_versioned")) {
    const auto* managed = static_cast<const dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule_.ptr(), "dltensor_versioned"));
    if (managed->version.major != dlpack::kMajorVersion) {
      Invalid(use.name + " is of DLPack " + std::to_string(managed->version.major) +
              ", which kvant does not know");
    }
    if (use.written && (managed->flags & dlpack::kFlagReadOnly))
      Invalid(use.name + " is read-only");
    if (use.written && (managed->flags & dlpack::kFlagIsCopied)) {
      Invalid(use.name + ", a " + TypeName(object_) + ", gives a copy of its memory only");
    }
    tensor_ = managed->dl_tensor;
  } else if (PyCapsule_IsValid(capsule_.ptr(), "dltensor")) {
    // As numpy does: what cannot say that it may be written is not.
    if (use.written) Invalid(use.name + " is read-only, as DLPack before version 1 is");
    tensor_ = static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"))
                  ->dl_tensor;
  } else {
    Invalid(use.name + ", a " + TypeName(object_) + ", gives no DLPack capsule");
  }
}

void* TensorView::stream() const {
  void* stream = nullptr;
  if (api_ != nullptr && tensor_.device.device_type != kDLCPU &&
      api_->current_work_stream(tensor_.device.device_type, tensor_.device.device_id, &stream) !=
          0) {
    throw nb::python_error();
  }
  return stream;
}

}  // namespace kvant_python
