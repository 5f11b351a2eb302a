// planaria._native: the one native module.
#include "arguments.hpp"

namespace planaria {

void bind_server(nb::module_& m);
void bind_trainer(nb::module_& m);
void bind_saves(nb::module_& m);
void bind_lossy(nb::module_& m);
void bind_packing(nb::module_& m);
void bind_data(nb::module_& m);
void bind_tiers(nb::module_& m);

namespace {

// Native errors become the classes of planaria.errors, so that callers see one exception tree.
void translate(const std::exception_ptr& error, void*) {
    const auto raise = [](const char* name, const std::exception& e) {
        PyErr_SetString(nb::module_::import_("planaria.errors").attr(name).ptr(), e.what());
    };
    try {
        std::rethrow_exception(error);
    } catch (const RowError& e) {
        raise("RowError", e);
    } catch (const ArgumentError& e) {
        raise("ArgumentError", e);
    } catch (const WireError& e) {
        raise("WireError", e);
    }
}

}  // namespace
}  // namespace planaria

NB_MODULE(_native, m) {
    using namespace planaria;
    nb::register_exception_translator(translate);
    bind_server(m);
    bind_trainer(m);
    bind_saves(m);
    bind_lossy(m);
    bind_packing(m);
    bind_data(m);
    bind_tiers(m);
    m.def("set_threads", &set_threads);
    m.def("threads", &get_threads);
    m.def("level", [] { return kernels().name; });
    m.def("level_supported", [](const std::string& name) { return level_supported(name.c_str()); });
    m.def("select_level", [](const std::string& name) { return select_level(name.c_str()); });
}
