// What Python calls: one function per step of a layer. Every argument is a struct, laid out as in engine/cpu/library.py.
#include "attention.h"
#include "matrix.h"
#include "rotary.h"
#include "wire.h"

extern "C" {

void multiply_bf16(const Product* product) { multiply<Bf16>(*product); }
void multiply_int8(const Product* product) { multiply<Int8>(*product); }
void turn_and_store(const Turn* what) { turn(*what); }
void attend_paged(const Attention* attention) { attend(*attention); }
void pack_wire(const Wire* wire) { pack(*wire); }
void unpack_wire(const Wire* wire) { unpack(*wire); }
void add_up_payload(Payload* payload) { add_up(*payload); }

}
