/* A model of Note [Stages] (src/comm/shm/stages.h) for spin: RANKS ranks go through STAGES stages with a
   table of ENTRIES. A sleeping thread wakes only if it is woken, so a wake-up that is lost is a
   deadlock, which spin reports. With -DDEATH one rank may die before any step: then those that are left may
   wait for ever, which is for others to notice, but nobody reads wrong bytes.

     spin -run -safety tools/stages.pml; spin -run -safety -DDEATH tools/stages.pml */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef ENTRIES
#define ENTRIES 2
#endif

byte published[RANKS];
byte consumed[RANKS];
byte sleepers[RANKS];
byte entry[RANKS * ENTRIES]; /* 1 + the stage whose bytes it has; 0 while it is written */
bool asleep[RANKS];
byte counter_of[RANKS]; /* on which counter a rank sleeps: published of r is r, consumed is RANKS + r */
bool died = false;

#ifdef DEATH
#define MAY_DIE if :: atomic { !died -> died = true; goto dead } :: true fi
#else
#define MAY_DIE skip
#endif

/* Stages::advance() after its store */
inline wake(counter) {
  q = 0;
  do
  :: q < RANKS && sleepers[q] > 0 ->
     atomic { /* FUTEX_WAKE */
       q = 0;
       do
       :: q < RANKS && asleep[q] && counter_of[q] == counter -> asleep[q] = false; q++
       :: q < RANKS && !(asleep[q] && counter_of[q] == counter) -> q++
       :: q == RANKS -> break
       od
     };
     break
  :: q < RANKS && sleepers[q] == 0 -> q++
  :: q == RANKS -> break
  od
}

/* Stages::sleep() */
inline sleep_on(counter, value) {
  sleepers[me]++;
  MAY_DIE;
  atomic { /* FUTEX_WAIT */
    if
    :: value == seen -> asleep[me] = true; counter_of[me] = counter
    :: else
    fi
  };
  (!asleep[me]);
  sleepers[me]--
}

proctype Rank(byte me) {
  byte next = 0; /* to publish */
  byte read = 0; /* to consume */
  byte q, r, seen;
  do
  :: read == STAGES -> break
  :: read < STAGES ->
     MAY_DIE;
     r = RANKS; /* reserve(): who still reads the entry's old bytes */
     if
     :: next < STAGES && next >= ENTRIES ->
        r = 0;
        do
        :: r < RANKS ->
           seen = consumed[r];
           if :: seen <= next - ENTRIES -> break :: else -> r++ fi
        :: else -> break
        od
     :: else
     fi;
     if
     :: next < STAGES && r == RANKS -> /* publish() */
        entry[me * ENTRIES + next % ENTRIES] = 0;
        MAY_DIE;
        entry[me * ENTRIES + next % ENTRIES] = next + 1;
        MAY_DIE;
        published[me] = next + 1;
        MAY_DIE;
        next++;
        wake(me)
     :: next == read && r < RANKS -> /* nothing to read before that */
        sleep_on(RANKS + r, consumed[r])
     :: next > read && !(next < STAGES && r == RANKS) ->
        r = 0; /* arrived() */
        do
        :: r < RANKS ->
           seen = published[r];
           if :: seen <= read -> break :: else -> r++ fi
        :: else -> break
        od;
        if
        :: r < RANKS -> sleep_on(r, published[r])
        :: else ->
           r = 0;
           do
           :: r < RANKS -> assert(entry[r * ENTRIES + read % ENTRIES] == read + 1); r++
           :: else -> break
           od;
           MAY_DIE;
           consumed[me] = read + 1;
           read++;
           wake(RANKS + me)
        fi
     fi
  od;
  goto done;
dead:
end_dead:
  (false);
done:
  skip
}

init {
  byte i = 0;
  atomic {
    do
    :: i < RANKS -> run Rank(i); i++
    :: else -> break
    od
  }
}
