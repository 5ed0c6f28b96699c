package kube

import (
	"culvert.dev/internal/kube/discovery"
	"culvert.dev/internal/kube/gatewayapi"
	"culvert.dev/registry/snapshot"
)

// A Status is what a process knows of Kubernetes, for people and for JSON.
type Status struct {
	Clusters   []discovery.Report `json:"clusters,omitempty"` // the own one first
	GatewayAPI *gatewayapi.Report `json:"gatewayAPI,omitempty"`
	Lease      *LeaseStatus       `json:"lease,omitempty"` // nil where this process never writes
}

// A LeaseStatus says who writes.
type LeaseStatus struct {
	Name   string `json:"name"`             // "culvert-system/culvert"
	Self   string `json:"self"`             // what this replica is called there
	Leads  bool   `json:"leads"`            // this replica does
	Holder string `json:"holder,omitempty"` // who does, as far as this replica has heard
	Error  string `json:"error,omitempty"`  // why this replica can't
}

// Status returns the current state. It is nil of a nil Kube.
func (k *Kube) Status() *Status {
	if k == nil {
		return nil
	}
	s := &Status{}
	for _, src := range k.sources {
		if k, ok := src.(*snapshot.Source); ok {
			src = k.Source
		}
		switch src := src.(type) {
		case *discovery.Source:
			s.Clusters = append(s.Clusters, src.Report())
		case *discovery.Clusters:
			s.Clusters = append(s.Clusters, src.Reports()...)
		case *gatewayapi.Controller:
			r := src.Report()
			s.GatewayAPI = &r
		}
	}
	if k.cfg.Lease != (Object{}) {
		s.Lease = &LeaseStatus{Name: k.cfg.Lease.Namespace + "/" + k.cfg.Lease.Name, Self: k.self, Leads: k.leads.Load()}
		if h := k.holder.Load(); h != nil {
			s.Lease.Holder = *h
		}
		if why := k.denied.Load(); why != nil {
			s.Lease.Error = *why
		}
	}
	return s
}
