// Package leases gives each of many keys a place of its own among many, and the
// same one for as long as it is there: ports to services, addresses to services.
//
//	plan := leases.Plan[string]{
//		Places: 1000, Now: time.Now(), Keep: 24 * time.Hour,
//		Start: func(key string) uint64 { return leases.Hash(key) }, Compare: strings.Compare,
//	}
//	have, without := plan.Assign([]string{"db.example.com"}, have)
//
// A lease does not move while its key is wanted. When it no longer is, nobody
// else gets the place for a while, so that who still knows it does not meet
// another there, and the key gets it back if it returns. A key that is new gets
// the place its hash leads to, or the next one that is free: who starts from
// nothing with the same keys gets the same places.
//
// A Plan is pure. A File keeps what it says on the disk, and one process at a time
// writes it.
package leases
