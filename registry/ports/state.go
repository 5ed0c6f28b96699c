package ports

import (
	"fmt"
	"io"

	"culvert.dev/registry/leases"
)

// A State is the file that assignments are kept in:
//
//	{"version": 1, "ports": [
//	  {"protocol": "tcp", "service": "db.example.com", "port": 5432, "assigned": 20017, "since": "2026-01-02T15:04:05Z"}
//	]}
//
// with "gone" besides where the service is gone.
type State struct{ Path string }

// A stateFile is the file's content.
type stateFile struct {
	Version int     `json:"version"`
	Ports   []entry `json:"ports"`
}

type entry struct {
	Protocol string `json:"protocol"`
	Service  string `json:"service"`
	Port     uint16 `json:"port,omitempty"`
	Assigned uint16 `json:"assigned"`
	leases.Times
}

func (s State) file() leases.File {
	return leases.File{Path: s.Path, What: "assigned ports", List: "ports"}
}

// Lock makes the file this process's until what it returns is closed, which is
// the caller's to do. It is leases.ErrHeld at once where another process has it.
func (s State) Lock() (io.Closer, error) { return s.file().Lock() }

// Load reads the file. One that is not there is empty. One that can't be read
// or understood as a whole is an error: whoever went on without it would give
// services other ports than their clients know.
func (s State) Load() ([]Assignment, error) { return leases.Load(s.file(), parse) }

// parse reads the content of a file and takes nothing for granted: two services
// of one port, and what this version does not know, are errors.
func parse(data []byte) ([]Assignment, error) {
	var f stateFile
	if err := leases.Parse(data, &f); err != nil {
		return nil, err
	}
	type port struct {
		protocol string
		number   uint16
	}
	keys, ports := map[Key]bool{}, map[port]Key{}
	all := make([]Assignment, 0, len(f.Ports))
	for i, e := range f.Ports {
		a := Assignment{Key: Key{e.Protocol, e.Service, e.Port}, Assigned: e.Assigned, Since: e.Since, Gone: e.Left()}
		other, twice := ports[port{e.Protocol, e.Assigned}]
		switch {
		case e.Protocol != "tcp" && e.Protocol != "udp":
			return nil, fmt.Errorf("entry %d has the protocol %q, which is not tcp or udp", i+1, e.Protocol)
		case e.Service == "":
			return nil, fmt.Errorf("entry %d names no service", i+1)
		case e.Assigned == 0:
			return nil, fmt.Errorf("entry %d, %s, has no assigned port", i+1, a.Key)
		case keys[a.Key]:
			return nil, fmt.Errorf("entry %d, %s, is there twice", i+1, a.Key)
		case twice:
			return nil, fmt.Errorf("entry %d, %s, has port %d, which is assigned to %s", i+1, a.Key, e.Assigned, other)
		}
		keys[a.Key], ports[port{e.Protocol, e.Assigned}] = true, a.Key
		all = append(all, a)
	}
	return all, nil
}

// Save writes the file anew: after a crash at any moment there is the old one
// or the new one, whole. Only its owner may read or write it. Who calls it has the
// Lock.
func (s State) Save(all []Assignment) error {
	entries := make([]entry, len(all))
	for i, a := range all {
		entries[i] = entry{a.Protocol, a.Service, a.Port, a.Assigned, leases.TimesOf(a.Since, a.Gone)}
	}
	return leases.Save(s.file(), entries)
}
