package file

import (
	"cmp"
	"regexp"
	"strconv"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// ImportedServices says how services that the cluster imports are given addresses in it.
type ImportedServices struct {
	Ports    registry.PortRange `yaml:"ports,required" as:"portRange"` // of the gateway's pods, one for each port of an import
	Selector PodLabels          `yaml:"selector,required"`             // of the gateway's pods, in the namespace of leader
}

// PodLabels are labels that a pod has all of.
type PodLabels map[string]string

var (
	labelKey   = regexp.MustCompile(`^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	labelValue = regexp.MustCompile(`^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$`)
)

func (l *PodLabels) decode(d *decoder, n *yaml.Node, key string) {
	if !d.is(n, yaml.MappingNode, key) {
		return
	}
	if len(n.Content) == 0 {
		d.errorf(n, "write labels that all pods of the gateway have, and no others", "%s is empty", key)
		return
	}
	*l = PodLabels{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		label, ok := d.text(k, "a label")
		if !ok {
			continue
		}
		value := ""
		if v.Value != "" {
			if value, ok = d.text(v, "the label "+strconv.Quote(clip(label))); !ok {
				continue
			}
		}
		switch _, twice := (*l)[label]; {
		case twice:
			d.errorf(k, "keep one of them", "label %q is listed twice", clip(label))
		case !labelKey.MatchString(label):
			d.errorf(k, "write it as app.kubernetes.io/name", "%q is not the name of a label", clip(label))
		case !labelValue.MatchString(value):
			d.errorf(v, "write at most 63 letters, digits, hyphens, underscores and dots", "%q is not the value of a label", clip(value))
		}
		(*l)[label] = value
	}
}

// checkImportedServices finds what imported services can't be given addresses by.
func (d *decoder) checkImportedServices(k *Kubernetes, at *yaml.Node) {
	if k.ImportedServices == nil {
		return
	}
	n := valueOf(at, "importedServices")
	if !k.MultiCluster {
		d.errorf(n, "add multiCluster: true", "importedServices needs the services of other clusters")
	}
	if k.Kubeconfig != "" {
		d.errorf(cmp.Or(valueOf(at, "kubeconfig"), n), "run the gateway in pods and leave kubeconfig out, or leave importedServices out", "importedServices leads to the gateway's pods, and with a kubeconfig the gateway runs outside of the cluster")
	}
}
