/* What a rank does whose memory was overwritten, for test_engine_bounds.py.
 *
 * The functions of the engine are here, and so are the places of its numbers.
 */
#include "engine.c"

enum { WHERE, MOST, COUNT, STEP, KIND, SITE, ABORT };

/* Arrives at the first step of an operation with a notice in which one number is another. */
void poke_notice(Engine *e, const Op *o, int field, int64_t value) {
    uint64_t whole = o->counts ? before(o->counts, e->size) : o->count;
    uint64_t most = o->counts ? largest(o->counts, e->size) : o->count;
    int64_t shares[RANKS];
    Op cut_up = *o;
    if (o->kind == ALL_GATHER) whole = most = (uint64_t)o->counts[e->rank];
    if (o->kind == ALL_REDUCE) {
        for (int rank = 0; rank < e->size; rank++)
            shares[rank] = (int64_t)share(e, o->count, rank);
        cut_up.counts = shares, most = largest(shares, e->size);
    }
    announce(e, &cut_up, o->in, whole, most);
    Notice *n = notice(e, e->rank, e->step + 1);
    uint32_t k = ++e->step;
    if (field == WHERE) n->where = (uint64_t)value;
    if (field == MOST) n->most = (uint64_t)value;
    if (field == COUNT) n->counts[e->rank] = value; /* of which the others have no copy */
    if (field == KIND) n->kind = (uint32_t)value;
    if (field == STEP) k = e->step = (uint32_t)value;
    if (field == SITE) n->kind ^= 1, memset(me(e)->site, 'x', SITE_BYTES), me(e)->told = 1;
    if (field == ABORT) atomic_store(&header(e)->abort, value);
    if (field != ABORT) atomic_store(&me(e)->step, k);
    wake(e, 0, e->size - 1);
}

/* Sends a message whose label is another. */
void poke_label(Engine *e, const Op *o, uint64_t where, uint32_t dtype) {
    Channel *c = channel(e, e->rank, (int)o->peer);
    c->labels[e->mailed[o->peer] & 1] = (Label){dtype, dtype ? dtype : o->kind, o->count, where};
    atomic_store(&c->sent, ++e->mailed[o->peer]);
    wake(e, (int)o->peer, (int)o->peer);
}

/* What a rank that waits for a peer finds out by `looks`, each of them `apart` ns after another. */
int poke_looks(Engine *e, int peer, int looks, int64_t apart) {
    Patience p = {.began = now(), .looked = now() - apart};
    int found = FINE;
    for (; looks && !found; looks--) {
        found = look(e, &p, peer);
        p.looked -= apart;
    }
    return found;
}
