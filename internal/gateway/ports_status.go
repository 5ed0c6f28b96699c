package gateway

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
)

// What may be said of the port of a service.
const (
	PortOpen     = "open"     // it is listened at
	PortAssigned = "assigned" // it is the service's, whether somebody listens there or not
	PortNew      = "new"      // it would be the service's if a gateway started
	PortHeld     = "held"     // it is the service's, and another process has it
	PortFull     = "full"     // there is none left
	PortFailed   = "failed"   // it cannot be opened, for another reason
	PortKept     = "kept"     // the service is gone, and nobody else gets it yet
)

// A ServicePort is the port of a service, or that it has none.
type ServicePort struct {
	Protocol string    `json:"protocol"`
	Name     string    `json:"name"`           // by which the service is asked for
	Port     uint16    `json:"port,omitempty"` // of the service; left out where it does not tell its ports apart
	Service  string    `json:"service,omitempty"`
	Assigned uint16    `json:"assigned,omitempty"` // left out where there is none
	Address  string    `json:"address,omitempty"`  // that is listened at
	State    string    `json:"state"`
	Problem  string    `json:"problem,omitempty"`
	Since    time.Time `json:"since,omitzero"`     // when it was assigned
	Until    time.Time `json:"keptUntil,omitzero"` // of a service that is gone
}

// describe says what has become of wishes, ordered by name, port and protocol.
func describe(cfg *ServicePorts, wishes map[alloc.PortKey]registry.Published, all []alloc.Port, failed []alloc.PortFailure, isOpen func(alloc.Port) bool) []ServicePort {
	problems := make(map[alloc.PortKey]error, len(failed))
	for _, f := range failed {
		problems[f.PortKey] = f.Err
	}
	list := make([]ServicePort, 0, len(wishes))
	seen := make(map[alloc.PortKey]bool, len(wishes))
	for _, a := range all {
		s := ServicePort{Protocol: a.Protocol, Name: a.Service, Port: a.Port, Assigned: a.Assigned, Address: cfg.listenAddress(a.Assigned), Since: a.Since, State: PortAssigned}
		switch err := problems[a.PortKey]; {
		case !a.Gone.IsZero():
			s.State, s.Until = PortKept, a.Gone.Add(cmp.Or(cfg.ReuseAfter, alloc.DefaultReuseAfter))
			if !s.Until.After(time.Now()) {
				continue // whoever needs it has it
			}
			list = append(list, s)
			continue
		case isOpen(a):
			s.State = PortOpen
		case inUse(err):
			s.State, s.Problem = PortHeld, "another process has the port: "+err.Error()
		case err != nil:
			s.State, s.Problem = PortFailed, err.Error()
		}
		s.Service = wishes[a.PortKey].Service
		seen[a.PortKey] = true
		list = append(list, s)
	}
	for key, w := range wishes {
		if seen[key] {
			continue
		}
		s := ServicePort{Protocol: key.Protocol, Name: key.Service, Port: key.Port, Service: w.Service, State: PortFailed}
		if err := problems[key]; err != nil {
			s.Problem = err.Error()
			if _, full := errors.AsType[*alloc.Exhausted](err); full {
				s.State = PortFull
			}
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b ServicePort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	return list
}

// ForecastPorts says which ports the services of t have and would have, by the
// state that is kept, without opening any. A StateError tells that that can't be
// read.
func ForecastPorts(cfg ServicePorts, t *registry.Table) ([]ServicePort, error) {
	have, err := alloc.PortFile(cfg.State).Load()
	if err != nil {
		return nil, &StateError{"service ports", "ports", err}
	}
	wishes, keys := portRequests(t)
	plan := alloc.PortPlan{Range: cfg.Range, ReuseAfter: cfg.ReuseAfter, Now: now()}
	next, failed := plan.Assign(keys, have)
	list := describe(&cfg, wishes, next, failed, func(alloc.Port) bool { return false })
	known := make(map[alloc.PortKey]uint16, len(have))
	for _, a := range have {
		known[a.PortKey] = a.Assigned
	}
	for i := range list {
		key := alloc.PortKey{Protocol: list[i].Protocol, Service: list[i].Name, Port: list[i].Port}
		if list[i].State == PortAssigned && known[key] != list[i].Assigned {
			list[i].State, list[i].Since = PortNew, time.Time{}
		}
	}
	return list, nil
}
