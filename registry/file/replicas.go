package file

import (
	"slices"

	"culvert.dev/registry"
)

// A replicaSet is the other replicas of this gateway.
type replicaSet struct {
	To         []string `yaml:"to,required,single" what:"a replica" as:"hostPort" unique:"replica" empty:"name a replica"`
	Protocol   string   `yaml:"protocol" oneof:"connect connect-h2 connect-h3 hbone" default:"connect-h2"`
	ServerName string   `yaml:"serverName" as:"host"` // "" means the host of To, if that is a name
	Key        string   `yaml:"key,required"`         // of identity.keys
	Trust      []string `yaml:"trust,required,single" what:"trust" unique:"trust" empty:"name trust of identity.trust"`
	IDs        []string `yaml:"ids,required" what:"a SPIFFE id" as:"workload" unique:"id" empty:"list the ids of the replicas"`
}

// Replicas are the other replicas of a gateway.
type Replicas struct {
	To  []string     // HOST:PORT
	Hop registry.Hop // how they are asked, without addresses
}

// registered returns r as the rest of the program has it.
func (r *replicaSet) registered() *Replicas {
	if r == nil {
		return nil
	}
	return &Replicas{To: readable(r.To), Hop: registry.Hop{
		Proto: r.Protocol, ServerName: r.ServerName, KeyName: r.Key, TrustNames: readable(r.Trust), Peers: readable(r.IDs),
		ForwardIdentity: registry.HopIdentity{Assertion: true, Source: true},
	}}
}

// check finds keys of r that do not go together.
func (r *replicaSet) check(d *decoder, at mapping) {
	if has(at.node, "serverName") && r.Protocol == "hbone" {
		d.errorf(keyOf(at.node, "serverName"), "leave it out", "serverName has no effect: clients of hbone send no name")
	}
	d.checkTrustOf(at.node, "ids", domainsOf(readable(r.IDs)))
}

// useReplicas has all trust domains believe replicas about their callers, as they believe this
// gateway itself.
func (d *decoder) useReplicas() {
	r, c := d.cfg.Replicas, d.cfg.Identity
	if r == nil || c == nil {
		return
	}
	for name, t := range c.Trust {
		if t == nil || t.TrustDomain(name) == "" {
			continue
		}
		for _, id := range r.Hop.Peers {
			if !slices.Contains(t.Delegates, id) {
				t.Delegates = append(slices.Clip(t.Delegates), id)
			}
		}
	}
}
