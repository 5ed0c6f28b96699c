// Package mesh demonstrates what the parts are for when they stand together: two
// clusters of a real control plane each, whose pods can't reach each other, and a
// service of one that pods of the other reach by its name in the cluster set.
package mesh
