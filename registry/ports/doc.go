// Package ports gives each of many services a port of its own from one range,
// and the same one for as long as it is there.
//
//	state := ports.State{Path: "/var/lib/culvert/ports.json"}
//	lock, err := state.Lock() // until the process ends
//	if err != nil {
//		return err // another process gives these ports
//	}
//	defer lock.Close()
//	have, err := state.Load()
//	if err != nil {
//		return err // never start over by itself: clients know these ports
//	}
//	plan := ports.Plan{Range: ports.Range{First: 20000, Last: 20999}, Now: time.Now()}
//	have, failures := plan.Assign([]ports.Key{{Protocol: "tcp", Service: "db.example.com", Port: 5432}}, have)
//	if err := state.Save(have); err != nil {
//		return err
//	}
//
// An assignment does not move while its service stays. When the service is
// gone nobody else gets the port for a while, so that clients that still know
// it don't reach another service by surprise, and the service gets it back if
// it returns. A service that is new gets the port its name leads to, or the
// next one that is free: who starts from nothing with the same services gets
// the same ports.
//
// Assign is pure. Sockets, clocks and what else may be in the way are its
// caller's.
package ports
