package alloc

import "fmt"

// PortFile returns the File that ports are kept in:
//
//	{"version": 1, "ports": [
//	  {"protocol": "tcp", "service": "db.example.com", "port": 5432, "assigned": 20017, "since": "2026-01-02T15:04:05Z"}
//	]}
//
// with "gone" besides where the service is gone.
func PortFile(path string) File[Port] {
	return File[Port]{Path: path, what: "assigned ports", list: "ports", parse: parsePorts, entry: func(a Port) any {
		return &portEntry{a.Protocol, a.Service, a.Port, a.Assigned, timesOf(a.Since, a.Gone)}
	}}
}

type portEntry struct {
	Protocol string `json:"protocol"`
	Service  string `json:"service"`
	Port     uint16 `json:"port,omitempty"`
	Assigned uint16 `json:"assigned"`
	times
}

// parsePorts reads the content of a file and takes nothing for granted: two services
// of one port, and what this version does not know, are errors.
func parsePorts(data []byte) ([]Port, error) {
	var f struct {
		Version int         `json:"version"`
		Ports   []portEntry `json:"ports"`
	}
	if err := parseFile(data, &f); err != nil {
		return nil, err
	}
	type port struct {
		protocol string
		number   uint16
	}
	keys, ports := map[PortKey]bool{}, map[port]PortKey{}
	all := make([]Port, 0, len(f.Ports))
	for i, e := range f.Ports {
		a := Port{PortKey: PortKey{e.Protocol, e.Service, e.Port}, Assigned: e.Assigned, Since: e.Since, Gone: e.gone()}
		other, twice := ports[port{e.Protocol, e.Assigned}]
		switch {
		case e.Protocol != "tcp" && e.Protocol != "udp":
			return nil, fmt.Errorf("entry %d has the protocol %q, which is not tcp or udp", i+1, e.Protocol)
		case e.Service == "":
			return nil, fmt.Errorf("entry %d names no service", i+1)
		case e.Assigned == 0:
			return nil, fmt.Errorf("entry %d, %s, has no assigned port", i+1, a.PortKey)
		case keys[a.PortKey]:
			return nil, fmt.Errorf("entry %d, %s, is there twice", i+1, a.PortKey)
		case twice:
			return nil, fmt.Errorf("entry %d, %s, has port %d, which is assigned to %s", i+1, a.PortKey, e.Assigned, other)
		}
		keys[a.PortKey], ports[port{e.Protocol, e.Assigned}] = true, a.PortKey
		all = append(all, a)
	}
	return all, nil
}
