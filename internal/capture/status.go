package capture

// A Status is a capture as the kernel has it.
type Status struct {
	Name  string `json:"name,omitempty"`
	Table string `json:"table"` // of the family inet

	// Owner is the process with which the table goes; nil for one that stays by itself.
	Owner *Owner `json:"owner,omitempty"`

	Port            uint16 `json:"port"`                      // to which connections are redirected
	TransparentPort uint16 `json:"transparent_port,omitzero"` // for those that this host routes; 0 means none
	DNSPort         uint16 `json:"dns_port,omitzero"`         // of DNS; 0 means none

	// ListensIPv4 and ListensIPv6 report whether a program listens at Port of the loopback
	// address. Connections by a family are refused where none does.
	ListensIPv4 bool `json:"listens_ipv4"`
	ListensIPv6 bool `json:"listens_ipv6"`

	All     bool     `json:"all,omitempty"` // every destination
	VIPs    []string `json:"vips,omitempty"`
	CIDRs   []string `json:"cidrs,omitempty"`
	UIDs    []uint32 `json:"uids,omitempty"` // of the programs; without these and Cgroups, every one's
	Cgroups []string `json:"cgroups,omitempty"`

	Interfaces []string `json:"interfaces,omitempty"` // by which connections come that are routed

	ExceptCIDRs []string `json:"except_cidrs,omitempty"`
	ExceptUIDs  []uint32 `json:"except_uids,omitempty"`
	ExceptMark  uint32   `json:"except_mark,omitzero"`
}

// An Owner is the process that has a table.
type Owner struct {
	PID     int    `json:"pid,omitzero"` // 0 where it is not known: it is another user's, or in another namespace
	Program string `json:"program,omitempty"`
}
