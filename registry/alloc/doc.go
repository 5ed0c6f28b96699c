// Package alloc gives each of many services a port or addresses of its own, and
// the same ones for as long as the service is there.
//
//	state := alloc.PortFile("/var/lib/culvert/ports.json")
//	lock, err := state.Lock() // until the process ends
//	if err != nil {
//		return err // another process assigns these ports
//	}
//	defer lock.Close()
//	assigned, err := state.Load()
//	if err != nil {
//		return err // never start over by itself: clients know these ports
//	}
//	plan := alloc.PortPlan{Range: registry.PortRange{First: 20000, Last: 20999}, Now: time.Now()}
//	assigned, failures := plan.Assign([]alloc.PortKey{{Protocol: "tcp", Service: "db.example.com", Port: 5432}}, assigned)
//	if err := state.Save(assigned); err != nil {
//		return err
//	}
//
// VIPPlan and VIPFile do the same for addresses, one of IPv4 and one of IPv6.
//
// An allocation does not move while its service is there. When the service is
// gone, no other service gets the port or address for a while, so that clients
// that still know it do not reach another service by surprise; the service gets
// it back if it returns. A new service gets the one that the hash of its name
// leads to, or the next one that is free: two gateways that start from nothing
// with the same services assign the same ports.
//
// Plans are pure. Sockets, clocks, and what else uses the range are their
// caller's business. A File keeps what a plan has assigned, and one process at a
// time writes it.
package alloc
