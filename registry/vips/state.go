package vips

import (
	"fmt"
	"io"
	"net/netip"

	"culvert.dev/registry/leases"
)

// A State is the file that assignments are kept in:
//
//	{"version": 1, "vips": [
//	  {"service": "db.example.com", "address": "240.17.3.9", "since": "2026-01-02T15:04:05Z"}
//	]}
//
// with "gone" besides where the service is gone.
type State struct{ Path string }

// A stateFile is the file's content.
type stateFile struct {
	Version int     `json:"version"`
	VIPs    []entry `json:"vips"`
}

type entry struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	leases.Times
}

func (s State) file() leases.File {
	return leases.File{Path: s.Path, What: "assigned VIPs", List: "vips"}
}

// Lock makes the file this process's until what it returns is closed, which is
// the caller's to do. It is leases.ErrHeld at once where another process has it.
func (s State) Lock() (io.Closer, error) { return s.file().Lock() }

// Load reads the file. One that is not there is empty. One that can't be read
// or understood as a whole is an error: whoever went on without it would give
// services other addresses than their clients know.
func (s State) Load() ([]Assignment, error) { return leases.Load(s.file(), parse) }

// parse reads the content of a file and takes nothing for granted: two services
// of one address, two addresses of one family, and what this version does not
// know, are errors.
func parse(data []byte) ([]Assignment, error) {
	var f stateFile
	if err := leases.Parse(data, &f); err != nil {
		return nil, err
	}
	type has struct{ service, family string }
	services, addresses := make(map[has]bool, len(f.VIPs)), make(map[netip.Addr]string, len(f.VIPs))
	all := make([]Assignment, 0, len(f.VIPs))
	for i, e := range f.VIPs {
		other, twice := addresses[e.Address]
		key := has{e.Service, Family(e.Address)}
		switch {
		case e.Service == "":
			return nil, fmt.Errorf("entry %d names no service", i+1)
		case !e.Address.IsValid():
			return nil, fmt.Errorf("entry %d, %s, has no address", i+1, e.Service)
		case e.Address.Is4In6() || e.Address.Zone() != "":
			return nil, fmt.Errorf("entry %d, %s, has the address %q: write it without a zone, and IPv4 as IPv4", i+1, e.Service, e.Address)
		case services[key]:
			return nil, fmt.Errorf("entry %d, %s, has an %s address already", i+1, e.Service, key.family)
		case twice:
			return nil, fmt.Errorf("entry %d, %s, has %s, which is assigned to %s", i+1, e.Service, e.Address, other)
		}
		services[key], addresses[e.Address] = true, e.Service
		all = append(all, Assignment{Service: e.Service, Address: e.Address, Since: e.Since, Gone: e.Left()})
	}
	return all, nil
}

// Save writes the file anew: after a crash at any moment there is the old one
// or the new one, whole. Only its owner may read or write it. Who calls it has the
// Lock.
func (s State) Save(all []Assignment) error {
	entries := make([]entry, len(all))
	for i, a := range all {
		entries[i] = entry{a.Service, a.Address, leases.TimesOf(a.Since, a.Gone)}
	}
	return leases.Save(s.file(), entries)
}
